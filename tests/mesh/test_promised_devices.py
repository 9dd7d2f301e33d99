"""What `render` says of devices is what a running mesh has."""

from __future__ import annotations

from pathlib import Path

import pytest

from stagemesh import Mesh
from stagemesh.client.admin import AdminClient
from stagemesh.config.commands import render_file
from tests.mesh.processes import environment

PIPELINE = """
name: shapes
stages:
  - {name: writer, engine: synthetic, runtime: {shared_devices: true}}
  - {name: painter, stage_type: diffusion, engine: synthetic}
"""
TWO_PAINTERS = {"painter": {"runtime": {"num_replicas": 2}}}


def test_replicas_lie_on_the_devices_that_render_promised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TMPDIR", "XDG_RUNTIME_DIR"):
        monkeypatch.setenv(name, environment(tmp_path)[name])
    path = tmp_path / "pipeline.yaml"
    path.write_text(PIPELINE)
    with Mesh(path, stage_overrides=TWO_PAINTERS) as mesh, AdminClient(mesh.address) as admin:
        (node,) = admin.list_nodes()
        devices = {device.id: device.memory_bytes for device in node.devices}
        if len(devices) < 2:
            pytest.skip("two painters need two devices")
        replicas, missing = admin.list_replicas()
        real = {
            f"{row.report.replica.stage}/{row.report.replica.replica_id}": ", ".join(row.report.device_ids)
            for row in replicas
        }
    text, _ = render_file(path, devices, stage_overrides=TWO_PAINTERS)
    lines = [line.removeprefix("# ") for line in text.splitlines() if line.startswith("# ")]
    promised = dict(line.split(": ", 1) for line in lines if line.split("/")[0] in ("writer", "painter"))
    assert not missing
    assert promised == real and len(real) == 3
