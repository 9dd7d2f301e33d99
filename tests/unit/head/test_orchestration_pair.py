"""What the two stages of a prefill/decode pair are sent, and what becomes of a hand-off when things go wrong."""

from __future__ import annotations

from typing import Any

import pytest

from stagemesh.config import Pipeline
from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.v1 import frame_pb2 as frame_pb
from stagemesh.v1 import inference_pb2 as inference_pb
from stagemesh.v1 import prompt_pb2 as prompt_pb
from stagemesh.v1 import replica_pb2 as replica_pb
from stagemesh.v1 import sampling_pb2 as sampling_pb
from stagemesh.v1 import stage_pb2 as stage_pb
from stagemesh_head.orchestration import events as ev
from stagemesh_head.orchestration.machine import RequestMachine
from stagemesh_head.orchestration.plan import Planner

PAIR = (
    {"name": "prefill", "is_prefill_only": True, "connector": "c"},
    {"name": "decode", "is_decode_only": True, "connector": "c", "inputs": ("prefill",), "final_output": True},
)
BLOCKS = {"do_remote_prefill": True, "remote_engine_id": "p0", "remote_block_ids": [[1, 2]], "remote_host": "10.0.0.7"}
LOST = MeshError(Reason.REPLICA_LOST, "gone")


def planner(*stages: dict[str, Any]) -> Planner:
    rows = [{"engine": "synthetic", "model": "m", **row, "stage_id": number} for number, row in enumerate(stages)]
    return Planner(Pipeline.model_validate({"name": "p", "stages": rows}))


def request(*sampling: tuple[str, dict[str, Any]], **fields: Any) -> inference_pb.GenerateRequest:
    made = inference_pb.GenerateRequest(request_id="r", prompt=prompt_pb.Prompt(text="x"), **fields)
    for name, values in sampling:
        params = sampling_pb.SamplingParams(llm=sampling_pb.LlmSamplingParams(**values))
        made.sampling.add(stage=name, params=params)
    return made


class Drive:
    """A request's machine, and replicas that do as told."""

    def __init__(self, *stages: dict[str, Any], **fields: Any) -> None:
        sampling = fields.pop("sampling", ())
        self.machine = RequestMachine(planner(*(stages or PAIR)).plan(request(*sampling, **fields)), 0.0)
        self.now = 0.0
        self.sent: dict[str, stage_pb.SubmitTask] = {}
        self.end: ev.End | None = None
        self.tell(ev.Start())

    def tell(self, event: ev.Event) -> None:
        for command in self.machine.handle(event, self.now):
            if isinstance(command, ev.Bind):
                # As the head does it: a replica is there at once.
                self.tell(ev.Bound(command.task, replica_pb.ReplicaRef(stage=command.task), (0, "i", 0)))
            elif isinstance(command, ev.Submit):
                self.sent[command.task] = command.command
            elif isinstance(command, ev.End):
                self.end = command

    def output(self, name: str, *token_ids: int) -> None:
        self.machine.tasks[name].output.token_ids.extend(token_ids)
        self.tell(ev.OutputArrived(name))

    def finish(self, name: str, reason: int = frame_pb.FINISH_REASON_LENGTH, **extra: Any) -> None:
        usage = frame_pb.Usage(prompt_tokens=12, completion_tokens=len(self.machine.tasks[name].output.token_ids))
        finished = frame_pb.StageFinished(finish_reason=reason, usage=usage)  # type: ignore[arg-type]
        finished.extra.update(extra)
        self.tell(ev.Finished(name, finished))

    def prefill(self) -> None:
        self.output("prefill", 7)
        self.finish("prefill", kv_transfer_params=BLOCKS)

    def handed(self) -> dict[str, Any]:
        """Names in what the decode stage was handed."""
        return dict(self.sent["decode"].kv_transfer_params.fields)


def test_R11_prefill_makes_one_token_whatever_the_request_wants_and_keeps_its_blocks() -> None:
    wanted = {
        "max_tokens": 9, "min_tokens": 2, "n": 3, "stop": ["."], "stop_token_ids": [4], "logprobs": 2,
        "prompt_logprobs": 1, "truncate_prompt_tokens": 5, "temperature": 0.7, "seed": 3,
        "structured_outputs": sampling_pb.StructuredOutputs(regex="a+"),
    }  # fmt: skip
    drive = Drive(sampling=[("decode", wanted)])
    command = drive.sent["prefill"]
    one = sampling_pb.LlmSamplingParams(max_tokens=1, temperature=0.0, truncate_prompt_tokens=5)
    assert command.params.llm == one
    assert command.kv_transfer_params.fields["do_remote_decode"].bool_value
    assert not command.last_stage


def test_R11_decode_gets_the_request_as_it_is_and_what_prefill_returned() -> None:
    drive = Drive(sampling=[("decode", {"max_tokens": 9, "stop": ["."], "n": 3})])
    drive.prefill()
    command = drive.sent["decode"]
    assert command.prompt.text == "x" and not command.inputs
    assert (command.params.llm.max_tokens, list(command.params.llm.stop), command.params.llm.n) == (9, ["."], 3)
    assert drive.handed()["remote_host"].string_value == "10.0.0.7"


def test_pair_behind_another_stage_reads_that_stage_twice() -> None:
    first = {"name": "rewrite"}
    drive = Drive(first, {**PAIR[0], "inputs": ("rewrite",)}, PAIR[1])
    drive.output("rewrite", 5, 6)
    drive.finish("rewrite")
    drive.prefill()
    assert drive.sent["decode"].inputs == drive.sent["prefill"].inputs
    assert list(drive.sent["decode"].inputs[0].token_ids) == [5, 6]


def test_stage_after_the_pair_reads_the_answer() -> None:
    drive = Drive(*PAIR, {"name": "talker", "inputs": ("decode",), "final_output": True})
    drive.prefill()
    drive.output("decode", 1, 2, 3)
    drive.finish("decode")
    assert list(drive.sent["talker"].inputs[0].token_ids) == [1, 2, 3]
    assert not drive.sent["talker"].HasField("kv_transfer_params")


def test_R11_missing_hand_off_fails_the_request_and_says_where_to_look() -> None:
    drive = Drive()
    drive.output("prefill", 7)
    drive.finish("prefill")
    assert drive.end is not None and drive.end.error is not None
    assert drive.end.error.reason is Reason.STAGE_FAILED
    assert "prefill returned no kv_transfer_params: check both stages' kv_transfer_config" in drive.end.error.message
    assert "decode" not in drive.sent


def test_nothing_to_read_is_nothing_to_hand_over() -> None:
    drive = Drive()
    drive.finish("prefill", frame_pb.FINISH_REASON_COMPLETE)
    assert not drive.sent["decode"].HasField("kv_transfer_params") and drive.end is None


@pytest.mark.parametrize("output", [(), (1, 2)], ids=["before output", "mid-stream"])
def test_hand_off_serves_one_attempt_the_next_computes_the_prompt(output: tuple[int, ...]) -> None:
    drive = Drive(sampling=[("decode", {"temperature": 0.0})])
    drive.prefill()
    if output:
        drive.output("decode", *output)
    drive.tell(ev.Lost("decode", LOST))
    command = drive.sent["decode"]
    assert command.attempt == 2 and tuple(command.resume_token_ids) == output
    assert not command.HasField("kv_transfer_params")
    assert drive.sent["prefill"].attempt == 1


def test_prefill_that_is_lost_after_its_token_runs_again() -> None:
    drive = Drive(sampling=[("decode", {"temperature": 0.0})])
    drive.output("prefill", 7)
    drive.tell(ev.Lost("prefill", LOST))
    command = drive.sent["prefill"]
    assert command.attempt == 2 and not command.resume_token_ids
    drive.prefill()
    assert drive.handed()


@pytest.mark.parametrize(
    ("lease", "waited", "is_used"), [(None, 19.0, True), (None, 21.0, False), (300, 190.0, True), (300, 210.0, False)]
)
def test_hand_off_is_not_used_when_its_blocks_may_have_expired(lease: Any, waited: float, is_used: bool) -> None:
    config = {"kv_transfer_config": {"kv_connector_extra_config": {"kv_lease_duration": lease}}} if lease else {}
    drive = Drive({**PAIR[0], "engine_args": config}, PAIR[1])
    drive.output("prefill", 7)
    finished = frame_pb.StageFinished(finish_reason=frame_pb.FINISH_REASON_LENGTH)
    finished.extra.update({"kv_transfer_params": BLOCKS})
    # No decode replica is there for a while.
    (bind,) = [c for c in drive.machine.handle(ev.Finished("prefill", finished), 1.0) if isinstance(c, ev.Bind)]
    drive.now = 1.0 + waited
    drive.tell(ev.Bound(bind.task, replica_pb.ReplicaRef(stage="decode"), (0, "i", 0)))
    assert bool(drive.handed()) is is_used


def test_prompt_counts_once_and_no_address_leaves_the_mesh() -> None:
    drive = Drive()
    drive.prefill()
    drive.output("decode", 1, 2, 3)
    drive.finish("decode")
    assert drive.end is not None and drive.end.finished is not None
    usage = drive.end.finished.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (12, 3)
    stages = {row.stage: row.finished for row in drive.end.finished.stages}
    assert stages["prefill"].usage.prompt_tokens == 12
    assert not stages["prefill"].extra.fields
    assert drive.machine.tasks["prefill"].finished.extra.fields, "another attempt could need it"


def test_abort_between_the_halves_starts_no_decode() -> None:
    drive = Drive()
    drive.output("prefill", 7)
    drive.tell(ev.Stop(ev.StopCause.ASKED))
    drive.finish("prefill", kv_transfer_params=BLOCKS)
    assert "decode" not in drive.sent
    assert drive.end is not None and drive.end.finished.finish_reason == frame_pb.FINISH_REASON_ABORT
    assert drive.machine.is_quiet


def test_resumed_answer_needs_no_prefill() -> None:
    resume = inference_pb.ResumePoint(sequence=4)
    resume.stages.add(stage="decode", token_ids=[1, 2], text="ab")
    drive = Drive(sampling=[("decode", {"temperature": 0.0})], resume=resume)
    assert list(drive.sent) == ["decode"]
    assert list(drive.sent["decode"].resume_token_ids) == [1, 2]


def test_R5_one_set_of_parameters_serves_both_halves() -> None:
    for sets in ([("", {"max_tokens": 3})], [("", {"max_tokens": 8}), ("", {"max_tokens": 3})]):
        plan = planner(*PAIR).plan(request(*sets))
        assert [stage.params.llm.max_tokens for stage in plan.stages] == [1, 3]


@pytest.mark.parametrize(
    ("sets", "text"),
    [
        (
            [("prefill", {"max_tokens": 3})],
            "sampling[0].stage: 'prefill': a prefill stage runs with its decode stage's parameters: give them to "
            "'decode'",
        ),
        (
            [("", {})] * 3,
            "sampling: 3: sets without stage names go in order, one for each of the 2 stages (prefill, decode)",
        ),
    ],
    ids=["to prefill", "too many"],
)
def test_parameters_that_fit_no_pair_are_refused(sets: list[tuple[str, dict[str, Any]]], text: str) -> None:
    with pytest.raises(MeshError) as caught:
        planner(*PAIR).plan(request(*sets))
    assert caught.value.message == text


def test_prompt_that_goes_on_is_refused() -> None:
    with pytest.raises(MeshError) as caught:
        planner(*PAIR).plan(request(), is_interactive=True)
    assert caught.value.message == "pipeline: 'p': its prefill/decode pair takes a prompt whole"
