"""Where the head is, and how both clients speak to it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from stagemesh.addresses import default_head
from stagemesh.client.errors import InvalidRequest, invalid
from stagemesh.client.journey import Journey, RetryPolicy
from stagemesh.client.pipelines import PipelineInfo
from stagemesh.client.requests import RequestOptions
from stagemesh.client.sampling import SamplingByStage, to_sampling
from stagemesh.client.tracing import given_headers
from stagemesh.rpc.errors import Reason
from stagemesh.rpc.security import Security
from stagemesh.v1 import inference_pb2 as inference_pb
from stagemesh.wire import duration

DEFAULT_TIMEOUT_S = 600.0
"""Of a whole request: a picture of a large model on a busy mesh takes minutes."""
CALL_TIMEOUT_S = 10.0
"""Of the small calls."""
PAGE_SIZE = 1000


@dataclass(frozen=True, slots=True)
class Connection:
    """Settings of a client."""

    address: str = field(default_factory=default_head)
    """host:port of a head or gateway, or another gRPC target such as `dns:///head:8470`."""
    timeout_s: float = DEFAULT_TIMEOUT_S
    retries: RetryPolicy = field(default_factory=RetryPolicy)
    security: Security = field(default_factory=Security.from_environment)

    def journey(
        self,
        request: inference_pb.GenerateRequest,
        timeout_s: float | None,
        options: RequestOptions,
    ) -> Journey:
        """A request's way, from now. Raises InvalidRequest."""
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        if not timeout_s > 0:
            raise invalid("timeout", timeout_s, "want seconds, above 0")
        return Journey(
            request,
            timeout_s=timeout_s,
            policy=self.retries,
            clock=time.monotonic,
            keeps_references=options.get("references", False),
            trace_headers=given_headers(options.get("trace_headers")),
        )


def add_sampling(
    request: inference_pb.GenerateRequest, sampling: SamplingByStage | None, pipeline: PipelineInfo | None
) -> None:
    """Put the sampling parameters into the request; `pipeline` tells kinds of stages where names alone do not."""

    def stage_type(stage: str, position: int) -> str | None:
        return pipeline.stage_type(stage, position) if pipeline else None

    request.sampling.extend(to_sampling(sampling, stage_type))


def abort_message(request_ids: Sequence[str], timeout_s: float) -> inference_pb.AbortRequestRequest:
    """The message that aborts requests."""
    if not request_ids:
        raise InvalidRequest(Reason.INVALID_REQUEST, "request_ids: name at least one request", field="request_ids")
    return inference_pb.AbortRequestRequest(request_ids=request_ids, timeout=duration(timeout_s))
