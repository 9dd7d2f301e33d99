"""A replica whose address does not answer is told of, once, and takes no traffic."""

from __future__ import annotations

import socket
from pathlib import Path

from stagemesh_head.registry.rows import ReplicaState
from tests.mesh.harness import WRITER, cluster, eventually


async def test_link_that_cannot_be_opened_makes_its_replica_suspect(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound and not listening: nobody answers there
        endpoint = f"127.0.0.1:{closed.getsockname()[1]}"
        async with cluster(tmp_path, [WRITER]) as mesh:
            mesh.membership.ready("demo", "writer", 0, endpoint, "first")
            await eventually(lambda: [row.state for row in mesh.membership.rows()] == [ReplicaState.SUSPECT])
            (row,) = mesh.membership.rows()
            assert endpoint in row.reason or "refused" in row.reason
            assert mesh.membership.link_log == [(mesh.key("writer"), False)]
