"""A replica called without a head: one Execute stream to it, as a head has one, and one task at a time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc

from stagemesh.client.admin import AdminClient
from stagemesh.rpc.options import CHANNEL_OPTIONS
from stagemesh.v1 import frame_pb2 as frame_pb
from stagemesh.v1 import sampling_pb2 as sampling_pb
from stagemesh.v1 import stage_pb2 as stage_pb
from stagemesh.v1 import stage_pb2_grpc as stage_rpc


class Direct:
    """The replica of a mesh that has one."""

    def __init__(self, head: str) -> None:
        """Args: head: whose admin service says where the replica is."""
        with AdminClient(head) as admin:
            ((row,), _) = admin.list_replicas()
        self._replica = row.report.replica
        self._channel = grpc.aio.insecure_channel(row.report.endpoint, options=CHANNEL_OPTIONS)
        self._call: Any = None

    async def generate(self, prompt: str, tokens: int) -> AsyncIterator[frame_pb.TextDelta]:
        """One task's output, as its messages come."""
        if self._call is None:
            self._call = stage_rpc.StageServiceStub(self._channel).Execute()
            opening = stage_pb.OpenLink(head_epoch="benchmark", replica=self._replica)
            await self._call.write(stage_pb.ExecuteRequest(open=opening))
            await self._call.read()
        submit = stage_pb.SubmitTask(slot=1, request_id=prompt, attempt=1, delta=True)
        submit.prompt.text = prompt
        submit.params.llm.CopyFrom(sampling_pb.LlmSamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True))
        await self._call.write(stage_pb.ExecuteRequest(submits=[submit]))
        while (batch := await self._call.read()) is not grpc.aio.EOF:
            if batch.columns.slots:
                yield frame_pb.TextDelta(token_ids=batch.columns.token_ids, text="".join(batch.columns.texts))
            if any(event.HasField("finished") for event in batch.events):
                return
        raise RuntimeError("the replica closed the stream")
