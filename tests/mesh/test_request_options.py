"""R15 at the head: what a request says beside its prompt reaches every stage that knows it."""

from __future__ import annotations

from pathlib import Path

from stagemesh.v1 import inference_pb2 as inference_pb
from stagemesh.v1 import prompt_pb2 as prompt_pb
from stagemesh.v1 import sampling_pb2 as sampling_pb
from stagemesh.v1 import stage_pb2 as stage_pb
from tests.mesh.harness import PAINTER, WRITER, Call, cluster


async def test_R15_options_reach_both_stages_and_an_adapter_the_one_that_has_it(tmp_path: Path) -> None:
    painter_with_ink = {**PAINTER, "lora_modules": {"ink": "someone/ink"}}
    async with cluster(tmp_path, [WRITER, painter_with_ink]) as mesh:
        writer, painter = await mesh.add("writer"), await mesh.add("painter")
        request = inference_pb.GenerateRequest(
            prompt=prompt_pb.Prompt(text="a wish"),
            priority=-3,
            lora=sampling_pb.LoraRequest(name="ink", scale=0.5),
            cache_salt="tenant",
            data_parallel_rank=1,
            reasoning_ended=True,
        )
        traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        call = Call(mesh.stub.Generate(request, timeout=20, metadata=(("traceparent", traceparent),)))
        task = await writer.next_task()
        task.tokens([1], "red")
        task.finish()
        picture = await painter.next_task()

        def options(submit: stage_pb.SubmitTask) -> tuple[object, ...]:
            return (
                submit.priority, submit.cache_salt, submit.data_parallel_rank, submit.reasoning_ended,
                submit.traceparent.split("-")[1],
            )  # fmt: skip

        expected = (-3, "tenant", 1, True, traceparent.split("-")[1])
        assert options(task.submit) == options(picture.submit) == expected
        assert not task.submit.HasField("lora"), "the writer has no such adapter and would refuse"
        assert (picture.submit.lora.name, picture.submit.lora.scale) == ("ink", 0.5)
        picture.media(b"PNG")
        picture.finish()
        await call.rest()
