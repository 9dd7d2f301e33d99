"""R16 through a whole mesh: two replicas of a model that reads pictures, and a client."""

from __future__ import annotations

import io
import json
import tempfile
from pathlib import Path

import pytest
from PIL import Image

from stagemesh import Finished, InvalidRequest, MediaInput, Mesh, TextDelta
from tests.mesh.processes import environment

pytestmark = [pytest.mark.engines, pytest.mark.timeout(400)]


def _picture(color: str, uuid: str = "") -> MediaInput:
    buffer = io.BytesIO()
    Image.new("RGB", (40, 30), color).save(buffer, format="png")
    return MediaInput(buffer.getvalue(), modality="image", uuid=uuid)


def _ask(mesh: Mesh, media: MediaInput) -> tuple[list[int], int]:
    """The tokens of the answer, and the replica that gave it."""
    frames = list(mesh.generate("what is it?", media=[media]))
    assert isinstance(frames[-1], Finished)
    ids = [token for frame in frames if isinstance(frame, TextDelta) for token in frame.token_ids]
    return ids, frames[-1].stages["viewer"].replicas[0]


def test_R16_either_replica_sees_every_picture_also_one_that_the_other_has_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tiny_idefics

    for name in ("TMPDIR", "XDG_RUNTIME_DIR"):
        monkeypatch.setenv(name, environment(tmp_path)[name])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "model").mkdir()
    tiny_idefics.make(tmp_path / "model")
    viewer = {
        "name": "viewer", "model": "model", "input_adapter": "chat", "runtime": {"num_replicas": 2},
        "engine_args": {"max_model_len": 128},
        "default_sampling_params": {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True},
    }  # fmt: skip
    path = tmp_path / "viewer.yaml"
    path.write_text(json.dumps({"name": "viewer", "routing": {"policy": "round-robin"}, "stages": [viewer]}))
    with Mesh(path, start_timeout=300) as mesh:
        for make in (lambda color: _picture(color), lambda color: _picture(color, uuid=f"a {color} one")):
            red, blue = [_ask(mesh, make("red")) for _ in range(4)], [_ask(mesh, make("blue")) for _ in range(4)]
            assert {replica for _, replica in red} == {replica for _, replica in blue} == {0, 1}
            assert all(ids == red[0][0] for ids, _ in red) and all(ids == blue[0][0] for ids, _ in blue)
            assert red[0][0] != blue[0][0]
        with pytest.raises(InvalidRequest, match=r"stage 'viewer' sets no engine_args\.allowed_media_domains"):
            list(mesh.generate("what is it?", media=[MediaInput("https://pictures.example/cat.png")]))
