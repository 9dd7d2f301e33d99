"""A mesh of real processes with mutual TLS and role tokens on every link."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

import stagemesh
from stagemesh import Client, MeshError, Reason, Reference, TensorFrame, TextDelta
from stagemesh.client.admin import AdminClient
from stagemesh.client.sync import open_sync_channel
from stagemesh.rpc.certificates import create_authority, issue_certificate
from stagemesh.rpc.security import Security
from stagemesh.v1 import replica_pb2 as replica_pb
from stagemesh.v1 import tensor_pb2 as tensor_pb
from stagemesh.v1 import tensor_pb2_grpc as tensor_rpc
from tests.mesh.faults.processes import eventually, processes

PIPELINE = "name: sketch\nstages:\n- {name: writer, engine: synthetic, engine_args: {tokens: 8}}\n"
STATES = """- {name: states, inputs: [], engine: synthetic, final_output_type: latent, final_output: true,
   engine_args: {tensor_shape: [100, 1024]}, runtime: {shared_devices: true}}
"""
TOKENS = {role: f"{role}-token-0123456789" for role in ("client", "worker", "operator")}


def test_everything_works_with_tls_and_tokens_and_nothing_without(tmp_path: Path) -> None:
    certs = tmp_path / "certs"
    create_authority(certs)
    certificate, key = issue_certificate(certs, "mesh", ["127.0.0.1"])
    book = tmp_path / "tokens"
    book.write_text("".join(f"{role} {secret}\n" for role, secret in TOKENS.items()))
    for role, secret in TOKENS.items():
        (tmp_path / f"{role}.token").write_text(secret)

    def security(role: str) -> Security:
        return Security(
            tls_ca=certs / "ca.pem", tls_cert=certificate, tls_key=key, token_file=tmp_path / f"{role}.token"
        )

    with processes(tmp_path, PIPELINE + STATES) as mesh:
        mesh.environment |= {
            "STAGEMESH_TLS_CERT": str(certificate),
            "STAGEMESH_TLS_KEY": str(key),
            "STAGEMESH_TLS_CA": str(certs / "ca.pem"),
            "STAGEMESH_TOKENS": str(book),
            "STAGEMESH_TOKEN_FILE": str(tmp_path / "worker.token"),
        }
        mesh.start_head()
        worker = mesh.start_worker("a")
        with AdminClient(mesh.address, security=security("operator")) as admin:
            eventually(
                "the replica is ready",
                lambda: len([r for r in admin.list_replicas()[0] if r.state == replica_pb.REPLICA_STATE_READY]) == 2,
            )
            rows = {row.report.replica.stage: row.report for row in admin.list_replicas()[0]}
        assert "joined" in worker.output
        with Client(mesh.address, security=security("client")) as client:
            frames = list(client.generate("a wish", timeout=30, references=True))
            assert "".join(frame.text for frame in frames if isinstance(frame, TextDelta))
            (left,) = [frame for frame in frames if isinstance(frame, Reference)]
            brought = client.fetch(left, timeout=30)
            assert isinstance(brought, TensorFrame) and brought.array.shape == (100, 1024)
        ref = left.message.tensor.value.ref
        request = tensor_pb.FetchTensorRequest(key=ref.key, owner_incarnation=ref.owner_incarnation)
        with open_sync_channel(rows["states"].endpoint, security("client")) as channel:
            with pytest.raises(grpc.RpcError) as caught:
                list(tensor_rpc.TensorServiceStub(channel).FetchTensor(request, timeout=10))
            assert MeshError.from_rpc_error(caught.value).reason is Reason.PERMISSION_DENIED, "it asks the head"
        with Client(mesh.address, security=security("worker")) as client, pytest.raises(stagemesh.AccessDenied):
            client.fetch(left, timeout=10)
        with Client(mesh.address, security=Security()) as client, pytest.raises(stagemesh.StageMeshError):
            client.fetch(left, timeout=5)
        with Client(mesh.address, security=security("worker")) as client, pytest.raises(stagemesh.AccessDenied):
            list(client.generate("a wish", timeout=10))
        with AdminClient(mesh.address, security=security("client")) as admin, pytest.raises(stagemesh.AccessDenied):
            admin.list_nodes()
        with Client(mesh.address, security=Security()) as client, pytest.raises(stagemesh.StageMeshError):
            list(client.generate("a wish", timeout=5))


def test_a_node_with_a_bad_token_is_refused_with_a_sentence_on_both_sides(tmp_path: Path) -> None:
    book = tmp_path / "tokens"
    book.write_text("".join(f"{role} {secret}\n" for role, secret in TOKENS.items()))
    (tmp_path / "own").write_text("made-up-token-0123456789")
    with processes(tmp_path, PIPELINE) as mesh:
        mesh.environment["STAGEMESH_TOKENS"] = str(book)
        head = mesh.start_head()
        mesh.environment["STAGEMESH_TOKEN_FILE"] = str(tmp_path / "own")
        worker = mesh.start_worker("a")
        eventually("it is refused", lambda: "the token is not known here" in worker.output, 20)
        refusal = "refused a call of /stagemesh.v1.RegistryService/Join: the token is not known here"
        eventually("the head says so too", lambda: refusal in head.output, 5)
