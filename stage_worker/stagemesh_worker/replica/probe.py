"""The self-probe: a replica is ready once it has answered a small real task through its own endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc

from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.rpc.options import open_channel
from stagemesh.v1 import stage_pb2 as stage_pb
from stagemesh.v1 import stage_pb2_grpc as stage_grpc
from stagemesh_worker.replica.identity import Identity

PROBE_REQUEST_ID = "self-probe"


async def probe(endpoint: str, identity: Identity, task: stage_pb.SubmitTask, epoch: str, timeout_s: float) -> None:
    """Run the engine's own small task at `endpoint`. Raises MeshError(START_FAILED) that says what went wrong."""
    submit = stage_pb.SubmitTask(slot=1, request_id=PROBE_REQUEST_ID, attempt=1)
    submit.MergeFrom(task)
    opening = stage_pb.ExecuteRequest(
        open=stage_pb.OpenLink(head_epoch=epoch, replica=identity.reference), submits=[submit]
    )
    done = asyncio.Event()

    async def requests() -> AsyncIterator[stage_pb.ExecuteRequest]:
        yield opening
        await done.wait()  # the end of the requests would end the stream, and the task with it

    channel = open_channel(endpoint)
    call = stage_grpc.StageServiceStub(channel).Execute(requests())
    try:
        async with asyncio.timeout(timeout_s):
            async for response in call:
                for event in response.events:
                    if event.HasField("finished"):
                        return
                    if event.HasField("failed"):
                        raise _failed(MeshError.from_status(event.failed).message)
        raise _failed("the stream ended before the task did")
    except TimeoutError:
        raise _failed(f"no answer within {timeout_s:g} s") from None
    except grpc.RpcError as error:
        raise _failed(MeshError.from_rpc_error(error).message) from error
    finally:
        done.set()
        call.cancel()
        await channel.close()


def _failed(why: str) -> MeshError:
    return MeshError(Reason.START_FAILED, f"the self-probe failed: {why}")
