"""R16 on a real engine: pictures reach vLLM, under keys that belong to one replica."""

from __future__ import annotations

import asyncio
import functools
import http.server
import io
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from PIL import Image
from replica_harness import HeadLink, Replica, StartReplica, submit

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.tensors import encode
from stagemesh.v1 import prompt_pb2 as prompt_pb
from stagemesh.v1 import stage_pb2 as stage_pb

pytestmark = [pytest.mark.engines, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]

START_S = 240.0
GREEDY = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
PROMPT = "<image> a red circle"


def _png(color: str, size: tuple[int, int] = (40, 30)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, color).save(buffer, format="png")
    return buffer.getvalue()


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the operator allows, beside one that is not."""
    folder = tmp_path_factory.mktemp("media") / "pictures"
    folder.mkdir()
    (folder / "red.png").write_bytes(_png("red"))
    (folder.parent / "secret.png").write_bytes(_png("red"))
    return folder


@pytest.fixture(scope="module")
def site(pictures: Path) -> Iterator[str]:
    """A web site of the pictures, on a domain that the operator allows; `/away` leads to one that is not."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != "/away":
                super().do_GET()
                return
            self.send_response(302)
            self.send_header("Location", f"http://127.0.0.1:{self.server.server_port}/red.png")  # type: ignore[attr-defined]
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(pictures)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://localhost:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def viewer(start_replica: StartReplica, tmp_path_factory: pytest.TempPathFactory, pictures: Path) -> Replica:
    """A replica of a tiny Idefics3."""
    import tiny_idefics

    replica = await start_replica(
        engine="vllm",
        model=str(tiny_idefics.make(tmp_path_factory.mktemp("tiny-idefics"))),
        engine_args={
            "max_model_len": 128, "limit_mm_per_prompt": {"image": 2}, "allowed_local_media_path": str(pictures),
            "allowed_media_domains": ["localhost"], "block_size": 32, "enable_prefix_caching": True,
        },
    )  # fmt: skip
    return await replica.ready(START_S)


def _task(slot: int, *media: prompt_pb.MediaInput | bytes, prompt: str = PROMPT, **fields: Any) -> stage_pb.SubmitTask:
    task = submit(slot, prompt, llm=GREEDY, **fields)
    for item in media:
        given = prompt_pb.MediaInput(modality="image", data=item) if isinstance(item, bytes) else item
        task.prompt.media.append(given)
    return task


async def _output(link: HeadLink, task: stage_pb.SubmitTask) -> list[int]:
    await link.send(submits=[task])
    ending = await link.end_of(task.slot)
    assert ending.HasField("finished"), ending
    return link.token_ids(task.slot)


async def _refusal(link: HeadLink, task: stage_pb.SubmitTask) -> MeshError:
    await link.send(submits=[task])
    ending = await link.end_of(task.slot)
    assert ending.HasField("failed"), ending
    return MeshError.from_status(ending.failed)


async def test_R16_what_is_in_the_picture_decides_the_output_however_the_picture_came(
    viewer: Replica, pictures: Path, site: str
) -> None:
    link = await viewer.link()
    red, blue = await _output(link, _task(1, _png("red"))), await _output(link, _task(2, _png("blue")))
    assert red != blue
    pixels = np.zeros((30, 40, 3), np.uint8)
    pixels[:, :, 0] = 255
    tensor = prompt_pb.MediaInput(modality="image")
    tensor.tensor.inline.CopyFrom(encode(pixels))
    ways = [
        _at(f"file://{pictures}/red.png"),
        _at(f"{site}/red.png"),
        tensor,
        prompt_pb.MediaInput(modality="image", data=_png("red"), uuid="the-red-one"),
    ]
    for slot, item in enumerate(ways, 3):
        assert await _output(link, _task(slot, item)) == red, item
    finished = link.ending(1)
    assert finished is not None and finished.finished.usage.prompt_tokens == 10, "4 places, 3 around them, 3 of text"
    await link.close()


async def test_R16_several_pictures_keep_their_order_and_a_chat_gets_its_placeholders_from_the_template(
    viewer: Replica,
) -> None:
    link = await viewer.link()
    both = "a <image> <image>"
    first = await _output(link, _task(1, _png("red"), _png("blue"), prompt=both))
    second = await _output(link, _task(2, _png("blue"), _png("red"), prompt=both))
    assert first != second
    chat = _task(3, _png("red"))
    chat.prompt.chat.messages.add(role="user", content="a red circle")
    rendered = _task(4, _png("red"), prompt="<|user|><image>a red circle<|end|><|assistant|>")
    assert await _output(link, chat) == await _output(link, rendered)
    await link.close()


async def test_a_task_with_a_picture_goes_on_after_the_tokens_of_a_lost_replica(viewer: Replica) -> None:
    link = await viewer.link()
    whole = await _output(link, _task(1, _png("red")))
    rest = await _output(link, _task(2, _png("red"), resume_token_ids=whole[:3], attempt=2))
    assert whole[:3] + rest == whole
    await link.close()


def _at(url: str) -> prompt_pb.MediaInput:
    return prompt_pb.MediaInput(modality="image", url=url)


@pytest.mark.parametrize(
    ("prompt", "media", "field", "problem"),
    [
        ("no place", [_png("red")], "prompt.media", "must have a placeholder for each item"),
        ("<image>", [_png("red")] * 2, "prompt.media", "must have a placeholder for each item"),
        ("<image><image><image>", [_png("red")] * 3, None, "At most 2 image(s) may be provided"),
        ("<image>", [b"no picture"], "prompt.media[0].data", "is no image file"),
        ("<image>", [_png("red", (9000, 9000))], "prompt.media[0].data", "exceed the maximum of 67108864 pixels"),
        ("<image>" + "a red circle " * 60, [_png("red")], None, "128"),
        ("<image>", [prompt_pb.MediaInput(modality="audio", data=b"x")], None, "audio"),
        ("<image>", [_at("file:///etc/passwd")], "prompt.media[0].url", "must be a subpath"),
        ("<image>", [_at("http://10.0.0.1/a.png")], "prompt.media[0].url", "must be from one of the allowed domains"),
        ("<image>", [_at("data:image/png;base64,")], "prompt.media[0].url", "must be an http, https or file URL"),
    ],
)
async def test_media_that_cannot_be_read_are_refused_by_name_and_the_engine_lives(
    viewer: Replica, prompt: str, media: list[Any], field: str | None, problem: str
) -> None:
    link = await viewer.link()
    error = await _refusal(link, _task(1, *media, prompt=prompt))
    assert problem in error.message, error.message
    assert error.reason in (Reason.INVALID_REQUEST, Reason.UNSUPPORTED), error
    assert field is None or error.metadata["field"] == field
    assert await _output(link, _task(2, _png("red")))
    await link.close()


async def test_an_allowed_domain_and_folder_lead_nowhere_else(viewer: Replica, pictures: Path, site: str) -> None:
    link = await viewer.link()
    (pictures / "link.png").symlink_to(pictures.parent / "secret.png")
    for slot, url in enumerate((f"{site}/away", f"file://{pictures}/../secret.png", f"file://{pictures}/link.png"), 1):
        error = await _refusal(link, _task(slot, _at(url)))
        assert (error.reason, error.metadata["field"]) == (Reason.INVALID_REQUEST, "prompt.media[0].url"), url
    await link.close()


async def test_R16_a_picture_is_not_withheld_because_a_refused_or_aborted_request_had_it_before(
    viewer: Replica,
) -> None:
    """vLLM's frontend remembers a picture as sent when it has processed it, also when the engine never saw it."""
    link = await viewer.link()
    await _refusal(link, _task(1, _png("green"), prompt="<image>" + "a red circle " * 60))
    green = await _output(link, _task(2, _png("green")))
    assert await _output(link, _task(3, _png("green"))) == green
    for slot, delay in enumerate(range(10), 10):
        color = f"#00{slot:02d}77"
        await link.send(submits=[_task(slot, _png(color))])
        for _ in range(delay):
            await asyncio.sleep(0.002)
        await link.send(aborts=[stage_pb.AbortTask(slot=slot)])
        await link.end_of(slot)
        assert len(await _output(link, _task(slot + 20, _png(color)))) == 8, delay
    await link.close()


async def test_R16_a_known_picture_is_a_known_prefix_for_the_same_tenant_only(viewer: Replica) -> None:
    link = await viewer.link()
    long = "<image>" + "a red circle " * 12

    async def cached(slot: int, color: str, **fields: Any) -> int:
        await _output(link, _task(slot, _png(color), prompt=long, **fields))
        finished = link.ending(slot)
        assert finished is not None
        return finished.finished.usage.cached_tokens

    assert await cached(1, "yellow") == 0
    assert await cached(2, "yellow") > 7, "beyond the picture's own places"
    assert await cached(3, "pink") == 0
    assert await cached(4, "yellow", cache_salt="another tenant") == 0
    await link.close()


async def test_an_id_cannot_be_used_for_another_picture_but_by_another_tenant(viewer: Replica) -> None:
    link = await viewer.link()

    def named(color: str) -> prompt_pb.MediaInput:
        return prompt_pb.MediaInput(modality="image", data=_png(color), uuid="mine")

    red, blue = await _output(link, _task(1, _png("red"))), await _output(link, _task(2, _png("blue")))
    assert await _output(link, _task(3, named("red"))) == red
    error = await _refusal(link, _task(4, named("blue")))
    assert (error.reason, error.metadata["field"]) == (Reason.INVALID_REQUEST, "prompt.media[0].uuid")
    assert await _output(link, _task(5, named("blue"), cache_salt="another tenant")) == blue
    await link.close()


async def test_a_placeholder_without_a_picture_is_text_and_does_not_harm_the_engine(viewer: Replica) -> None:
    link = await viewer.link()
    assert await _output(link, _task(1, prompt="<image> a red circle"))
    assert await _output(link, _task(2, _png("red"), prompt="<image> a red circle <image>"))
    assert await _output(link, _task(3, _png("red")))
    await link.close()


async def test_R16_what_one_replica_has_seen_is_never_withheld_from_another() -> None:
    """vLLM's own caches: one sender before two replicas, as a frontend that they share would have it."""
    from vllm.config.multimodal import MultiModalConfig
    from vllm.multimodal.cache.lru import LruKeyReplicatedReceiverCache, LruKeyReplicatedSenderCache
    from vllm.multimodal.inputs import MultiModalKwargsItem

    from stagemesh_worker.engines.vllm.media import MediaReader

    config: Any = SimpleNamespace(
        multimodal_config=MultiModalConfig(), allowed_local_media_path="", allowed_media_domains=None
    )
    config.get_multimodal_config = lambda: config.multimodal_config
    sender = LruKeyReplicatedSenderCache(config)
    named = prompt_pb.MediaInput(modality="image", data=_png("red"), uuid="a-picture")
    nameless = prompt_pb.MediaInput(modality="image", data=_png("blue"))
    for replica in range(2):
        receiver = LruKeyReplicatedReceiverCache(config)
        _, keys = await MediaReader(config, f"stage0:rep{replica}").read([named, nameless])
        first, second = keys["image"]
        assert first == f"stage0:rep{replica}:a-picture"
        assert re.fullmatch(rf"stage0:rep{replica}:[0-9a-f]{{64}}", second)
        for key in (first, second):
            sent, _ = sender.get_and_update_item((MultiModalKwargsItem.dummy(64), []), key)
            assert sent is not None, "this replica has not seen it"
            receiver.get_and_update_item(sent, key)
            again, _ = sender.get_and_update_item((MultiModalKwargsItem.dummy(64), []), key)
            assert again is None and receiver.get_and_update_item(again, key) is sent
