"""The contract: generated code is what protos/ says, and every error reason has its row."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2

from stagemesh.rpc.errors import CATALOGUE, DOMAIN, MeshError, Reason

ROOT = Path(__file__).resolve().parents[2]
GENERATOR = ROOT / ".tools/protos/bin"


def test_generated_code_is_what_the_protos_say(tmp_path: Path) -> None:
    if not (GENERATOR / "python").exists():
        pytest.fail("the generator is not installed: run `make install-dev`")
    environment = {**os.environ, "PATH": f"{GENERATOR}:{os.environ['PATH']}"}
    subprocess.run(
        [GENERATOR / "python", ROOT / "tools/generate_protos.py", "--out", tmp_path],
        check=True, env=environment, timeout=60,
    )  # fmt: skip
    checked_in = ROOT / "common/stagemesh/v1"
    fresh = {p.name: p.read_bytes() for p in (tmp_path / "stagemesh/v1").iterdir()}
    held = {p.name: p.read_bytes() for p in checked_in.iterdir() if "_pb2" in p.name and p.is_file()}
    assert sorted(fresh) == sorted(held)
    stale = [name for name in fresh if fresh[name] != held[name]]
    assert not stale, f"run `make protos`: {stale}"


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_survives_the_wire(reason: Reason) -> None:
    kind = CATALOGUE[reason]
    assert kind.text and len(reason.value) <= 63
    sent = MeshError(reason, field="x")
    got = MeshError.from_status(sent.to_status())
    assert (got.reason, got.message, got.metadata) == (reason, kind.text, {"field": "x"})
    assert got.code is kind.code and got.code is not grpc.StatusCode.OK
    assert got.retry_delay_s == kind.retry_delay_s


def test_only_unavailable_and_overload_and_rejoin_are_retryable() -> None:
    codes = {kind.code for kind in CATALOGUE.values() if kind.retryable}
    retryable = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.NOT_FOUND}
    assert codes <= retryable
    assert [r for r, k in CATALOGUE.items() if k.retryable and k.code is grpc.StatusCode.NOT_FOUND] == [
        Reason.NODE_UNKNOWN
    ]


def test_status_carries_one_error_info_of_our_domain() -> None:
    status = MeshError(Reason.OVERLOADED, "64 requests wait", limit=64).to_status()
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert (info.domain, info.reason, dict(info.metadata)) == (DOMAIN, "OVERLOADED", {"limit": "64"})
    assert sum(detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR) for detail in status.details) == 1


def test_long_message_is_cut_to_fit_a_header() -> None:
    assert len(MeshError(Reason.INTERNAL, "x" * 100_000).to_status().message) == 2000
