"""Large outputs stay with their replica until the client fetches them, and the pipeline says what is large."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from stagemesh import AsyncClient, Client, InvalidRequest, Mesh, NotFound, Reference, TensorFrame
from stagemesh.client.admin import AdminClient
from stagemesh.client.decode import decode
from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.v1 import frame_pb2 as frame_pb
from stagemesh.v1 import inference_pb2 as inference_pb
from stagemesh.v1 import inference_pb2_grpc as inference_rpc
from stagemesh.v1 import prompt_pb2 as prompt_pb
from stagemesh.v1 import tensor_pb2 as tensor_pb
from stagemesh.v1 import tensor_pb2_grpc as tensor_rpc
from tests.mesh.processes import environment

THRESHOLD = 4096
STAGE = (
    "- {{name: {}, inputs: [], engine: synthetic, final_output_type: latent, final_output: true, "
    "engine_args: {{tensor_shape: {}}}, runtime: {{shared_devices: true}}}}\n"
)
SHAPES = {"large": [700, 1024], "limit": [16, 64], "small": [15, 64]}


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    folder = tmp_path_factory.mktemp("fetch")
    path = folder / "states.yaml"
    stages = "".join(STAGE.format(name, shape) for name, shape in SHAPES.items())
    path.write_text(f"name: states\nlimits: {{tensor_threshold_bytes: {THRESHOLD}}}\nstages:\n{stages}")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("TMPDIR", "XDG_RUNTIME_DIR"):
            patch.setenv(name, environment(folder)[name])
        patch.setattr(tempfile, "tempdir", str(folder / "tmp"))
        with Mesh(path) as mesh:
            yield mesh


@pytest.fixture(scope="module")
def whole(mesh: Mesh) -> dict[str, np.ndarray]:
    """The tensors of a prompt, by stage."""
    return tensors(list(mesh.generate("a wish")))


def tensors(frames: list[Any]) -> dict[str, np.ndarray]:
    return {frame.stage: frame.array for frame in frames if isinstance(frame, TensorFrame)}


def references(mesh: Mesh, **options: Any) -> dict[str, Reference]:
    frames = mesh.generate("a wish", references=True, **options)
    return {frame.stage: frame for frame in frames if isinstance(frame, Reference)}


def raw(reference: Reference) -> tensor_pb.TensorRef:
    return reference.message.tensor.value.ref


def release(mesh: Mesh, reference: Reference) -> None:
    """Have the replica drop it, as the head does a minute after the request's end."""
    with AdminClient(mesh.address) as admin:
        rows = [row.report for row in admin.list_replicas()[0] if row.report.replica.stage == reference.stage]
    with grpc.insecure_channel(rows[0].endpoint) as channel:
        request = tensor_pb.ReleaseTensorsRequest(keys=[raw(reference).key])
        assert tensor_rpc.TensorServiceStub(channel).ReleaseTensors(request, timeout=10).released == 1


def test_large_outputs_are_fetched_as_they_come(whole: dict[str, np.ndarray]) -> None:
    assert {stage: array.shape for stage, array in whole.items()} == {
        "large": (700, 1024), "limit": (16, 64), "small": (15, 64),
    }  # fmt: skip
    assert all(array.dtype == np.float32 and not array.flags.writeable for array in whole.values())


def test_outputs_from_the_pipelines_threshold_on_can_be_left_and_fetched_later(
    mesh: Mesh, whole: dict[str, np.ndarray]
) -> None:
    frames = list(mesh.generate("a wish", references=True))
    left = {frame.stage: frame for frame in frames if isinstance(frame, Reference)}
    assert set(left) == {"large", "limit"}, f"the threshold is {THRESHOLD} bytes"
    np.testing.assert_array_equal(tensors(frames)["small"], whole["small"])
    large = left["large"]
    assert (large.kind, large.name, large.dtype, large.shape) == ("tensor", "hidden_states", "float32", (700, 1024))
    for _ in range(2):
        for stage, reference in left.items():
            brought = mesh.fetch(reference)
            assert isinstance(brought, TensorFrame) and brought.name == "hidden_states"
            assert (brought.stage, brought.sequence) == (stage, reference.sequence)
            np.testing.assert_array_equal(brought.array, whole[stage])


@pytest.mark.parametrize("mode", ["delta", "final"])
def test_what_clients_get_tells_nothing_of_the_inside_of_the_mesh(mesh: Mesh, mode: str) -> None:
    ref = raw(references(mesh, mode=mode)["large"])
    assert ref.key and ref.owner_incarnation
    assert (ref.endpoint, ref.host_id, ref.shared_memory) == ("", "", "")


async def test_an_event_loop_fetches_too(mesh: Mesh, whole: dict[str, np.ndarray]) -> None:
    async with AsyncClient(mesh.address) as client:
        at_once = tensors([frame async for frame in client.generate("a wish")])
        left = [f async for f in client.generate("a wish", references=True) if isinstance(f, Reference)]
        brought = await asyncio.gather(*(client.fetch(reference) for reference in left * 8))
    np.testing.assert_array_equal(at_once["large"], whole["large"])
    for frame in brought:
        assert isinstance(frame, TensorFrame)
        np.testing.assert_array_equal(frame.array, whole[frame.stage])


async def test_a_reference_whose_time_is_over_says_so(mesh: Mesh) -> None:
    reference = references(mesh)["large"]
    release(mesh, reference)
    with pytest.raises(NotFound, match="was released or its time is over") as caught:
        mesh.fetch(reference)
    assert caught.value.reason is Reason.TENSOR_GONE
    async with AsyncClient(mesh.address) as client:
        with pytest.raises(NotFound, match="was released or its time is over"):
            await client.fetch(reference)


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("key", "made-up", "was released or its time is over"),
        ("owner_incarnation", "made-up", "the replica that kept it is gone"),
    ],
)
def test_only_who_holds_a_reference_can_fetch(mesh: Mesh, field: str, value: str, problem: str) -> None:
    reference = references(mesh)["limit"]
    setattr(raw(reference), field, value)
    with pytest.raises(NotFound, match=problem):
        mesh.fetch(reference)


def test_a_bad_fetch_is_refused_by_name(mesh: Mesh) -> None:
    reference = references(mesh)["limit"]
    with pytest.raises(InvalidRequest, match="timeout: -1"):
        mesh.fetch(reference, timeout=-1)
    with grpc.insecure_channel(mesh.address) as channel:
        stub = inference_rpc.InferenceServiceStub(channel)
        for request, field in (
            (inference_pb.FetchOutputRequest(), "ref.key"),
            (inference_pb.FetchOutputRequest(ref=raw(reference), offset_bytes=1 << 30), "offset_bytes"),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                list(stub.FetchOutput(request, timeout=10))
            error = MeshError.from_rpc_error(caught.value)
            assert (error.reason, error.metadata["field"]) == (Reason.INVALID_REQUEST, field)
    raw(reference).shape[:] = [1 << 40]
    with pytest.raises(InvalidRequest, match="takes 4398046511104 bytes"):
        mesh.fetch(reference)


@pytest.mark.parametrize("place", ["embeds", "media"])
def test_a_prompt_cannot_send_a_replica_to_an_address_of_the_clients(mesh: Mesh, place: str) -> None:
    value = tensor_pb.TensorValue(ref=tensor_pb.TensorRef(endpoint="127.0.0.1:1", key="k", dtype="uint8"))
    prompt = prompt_pb.Prompt(embeds=value) if place == "embeds" else prompt_pb.Prompt(text="x")
    if place == "media":
        prompt.media.add(modality="image", tensor=value)
    with Client(mesh.address) as client, pytest.raises(InvalidRequest, match="want an inline tensor"):
        list(client.generate(prompt))


def test_frames_of_every_kind_have_their_reference(mesh: Mesh, whole: dict[str, np.ndarray]) -> None:
    """A file and a piece of sound by reference, as large ones come: here by a tensor's reference."""
    ref = raw(references(mesh)["limit"])
    data = whole["limit"].tobytes()
    file = frame_pb.MediaOutput(modality=frame_pb.MODALITY_VIDEO, mime_type="image/webp", index=1, width=3, seed=7)
    file.ref.CopyFrom(ref)
    file.ref.dtype, file.ref.shape[:] = "uint8", [len(data)]
    sound = frame_pb.AudioChunk(sample_rate_hz=24000, offset_samples=10, last=True)
    sound.samples.ref.CopyFrom(ref)
    for message, kind in ((frame_pb.Frame(media=file), "video"), (frame_pb.Frame(audio_chunk=sound), "audio_chunk")):
        left = decode(inference_pb.GenerateResponse(request_id="r", sequence=3, frame=message))
        assert isinstance(left, Reference) and left.kind == kind
        brought: Any = mesh.fetch(left)
        if kind == "video":
            assert (brought.data, brought.mime_type, brought.index, brought.seed) == (data, "image/webp", 1, 7)
        else:
            assert (brought.sample_rate_hz, brought.offset_samples, brought.last) == (24000, 10, True)
            np.testing.assert_array_equal(brought.samples, whole["limit"])
