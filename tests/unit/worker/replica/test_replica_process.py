"""A whole replica process with the synthetic engine."""

from __future__ import annotations

from stagemesh.v1 import frame_pb2 as frame_pb


async def test_replica_serves_a_task_after_it_said_ready(start_replica) -> None:
    replica = await (await start_replica(engine_args={"tokens": 12})).ready()
    link = await replica.link()
    await link.submit(1, "hello")
    finished = (await link.end_of(1)).finished
    assert finished.finish_reason == frame_pb.FINISH_REASON_STOP
    assert finished.usage.completion_tokens == 12
    assert len(link.token_ids(1)) == 12
    assert len(link.text(1).split()) == 12
    await link.close()
