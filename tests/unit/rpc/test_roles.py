"""Every service of the mesh with no, wrong, expired, wrong-role and right credentials."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.rpc.options import open_channel
from stagemesh.rpc.security import Role, Security
from stagemesh.rpc.server import bind, create_server
from stagemesh.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    registry_pb2,
    registry_pb2_grpc,
    stage_pb2,
    stage_pb2_grpc,
    tensor_pb2,
    tensor_pb2_grpc,
)

TOKENS = {role: f"{role}-token-0123456789" for role in Role}
EXPIRED = "expired-token-0123456789"

# Service -> a unary or server-streaming call of it, and the roles that may make it.
CALLS = {
    "InferenceService": (
        lambda c: inference_pb2_grpc.InferenceServiceStub(c).ListPipelines(inference_pb2.ListPipelinesRequest()),
        {Role.CLIENT, Role.OPERATOR},
    ),
    "AdminService": (
        lambda c: admin_pb2_grpc.AdminServiceStub(c).ListNodes(admin_pb2.ListNodesRequest()), {Role.OPERATOR},
    ),
    "RegistryService": (
        lambda c: registry_pb2_grpc.RegistryServiceStub(c).WatchReplicas(registry_pb2.WatchReplicasRequest()),
        {Role.WORKER},
    ),
    "StageService": (
        lambda c: stage_pb2_grpc.StageServiceStub(c).DescribeStage(stage_pb2.DescribeStageRequest()), {Role.WORKER},
    ),
    "TensorService": (
        lambda c: tensor_pb2_grpc.TensorServiceStub(c).FetchTensor(tensor_pb2.FetchTensorRequest()), {Role.WORKER},
    ),
}  # fmt: skip


@pytest.fixture
async def target(tmp_path: Path) -> AsyncIterator[str]:
    """A server with all services, whose handlers answer UNIMPLEMENTED to who may call them."""
    tokens = tmp_path / "tokens"
    lines = [f"{role} {secret}" for role, secret in TOKENS.items()]
    lines += [f"{role} {role}-{EXPIRED} 2020-01-01T00:00:00Z" for role in Role]
    tokens.write_text("\n".join(lines))
    security = Security(tokens=tokens)
    server = create_server(security)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(inference_pb2_grpc.InferenceServiceServicer(), server)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(admin_pb2_grpc.AdminServiceServicer(), server)
    registry_pb2_grpc.add_RegistryServiceServicer_to_server(registry_pb2_grpc.RegistryServiceServicer(), server)
    stage_pb2_grpc.add_StageServiceServicer_to_server(stage_pb2_grpc.StageServiceServicer(), server)
    tensor_pb2_grpc.add_TensorServiceServicer_to_server(tensor_pb2_grpc.TensorServiceServicer(), server)
    port = bind(server, "127.0.0.1:0", security)
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(0)


async def outcome(target: str, service: str, secret: str | None, tmp_path: Path) -> Reason:
    """The reason of the error that a call ends with."""
    own = None
    if secret is not None:
        own = tmp_path / "own"
        own.write_text(secret)
    async with open_channel(target, security=Security(token_file=own)) as channel:
        call = CALLS[service][0](channel)
        try:
            await (call.read() if isinstance(call, grpc.aio.UnaryStreamCall) else call)
        except grpc.aio.AioRpcError as error:
            return MeshError.from_rpc_error(error).reason
    raise AssertionError("an unimplemented method answered")


@pytest.mark.parametrize("service", CALLS)
async def test_no_token_is_refused(service: str, target: str, tmp_path: Path) -> None:
    assert await outcome(target, service, None, tmp_path) is Reason.UNAUTHENTICATED


@pytest.mark.parametrize("service", CALLS)
async def test_wrong_token_is_refused(service: str, target: str, tmp_path: Path) -> None:
    assert await outcome(target, service, "made-up-token-0123456789", tmp_path) is Reason.UNAUTHENTICATED


@pytest.mark.parametrize("service", CALLS)
@pytest.mark.parametrize("role", Role)
async def test_expired_token_is_refused(service: str, role: Role, target: str, tmp_path: Path) -> None:
    assert await outcome(target, service, f"{role}-{EXPIRED}", tmp_path) is Reason.UNAUTHENTICATED


@pytest.mark.parametrize("service", CALLS)
@pytest.mark.parametrize("role", Role)
async def test_role_decides(service: str, role: Role, target: str, tmp_path: Path) -> None:
    expected = Reason.UNSUPPORTED if role in CALLS[service][1] else Reason.PERMISSION_DENIED
    assert await outcome(target, service, TOKENS[role], tmp_path) is expected
