"""The output of a stage as one piece, for requests that want it only when it is done."""

from __future__ import annotations

from collections.abc import Iterator

from stagemesh.v1 import frame_pb2 as frame_pb
from stagemesh_head.orchestration.references import for_client
from stagemesh_head.orchestration.task import Task


def frames_of(task: Task) -> Iterator[frame_pb.Frame]:
    """All frames of a task that were held back: one of text for each completion, then the others in order."""
    replica_id = task.replicas[-1].replica_id if task.replicas else 0
    output = task.output
    merged: dict[int, frame_pb.TextDelta] = {}
    for delta in output.deltas:
        whole = merged.setdefault(delta.index, frame_pb.TextDelta(index=delta.index))
        whole.text += delta.text
        whole.token_ids.extend(delta.token_ids)
        whole.logprobs.extend(delta.logprobs)
        whole.top_logprobs.extend(delta.top_logprobs)
    if not merged and (output.token_ids or output.texts):
        merged[0] = frame_pb.TextDelta(text=output.text, token_ids=output.token_ids)
    for index in sorted(merged):
        yield frame_pb.Frame(stage=task.name, replica_id=replica_id, text=merged[index])
    yield from map(for_client, output.pieces)
