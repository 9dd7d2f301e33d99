"""Nodes that may not join: each reads why, the head says so too, and who is there goes on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.mesh.faults.load import text_of
from tests.mesh.faults.of_another_version import VERSION
from tests.mesh.faults.processes import Process, Processes, eventually, processes

PIPELINE = "name: sketch\nstages:\n- {name: writer, engine: synthetic, engine_args: {tokens: 8}}\n"
NODE = "stagemesh_worker"
CASES = {
    "another version": (
        "tests.mesh.faults.of_another_version", "newer", ["--devices", "cpu:1"], f"runs StageMesh {VERSION}, this head",
    ),
    "a node id that is taken": (NODE, "a", ["--devices", "cpu:1"], "node id 'a' is taken: host"),
    "an unknown stage": (
        NODE, "b", ["--devices", "cpu:1", "--stage", "writter"],
        "no pipeline here has a stage 'writter'; there are writer; did you mean writer?",
    ),
    "an unknown pipeline": (
        NODE, "b", ["--devices", "cpu:1", "--pipeline", "sketsh"],
        "hello.pipeline: 'sketsh': not served here; pipelines are sketch; did you mean sketch?",
    ),
    "another node's devices": (
        NODE, "b", ["--devices", "cpu:0"], "node 'b' offers cpu:0, which node 'a' on the same host",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Processes, Process]]:
    """A head and its node `a` on cpu:0, for all cases."""
    with processes(tmp_path_factory.mktemp("refusals"), PIPELINE) as made:
        head = made.start_head()
        made.start_worker("a", "--devices", "cpu:0")
        made.ready(1)
        yield made, head


@pytest.mark.parametrize("case", CASES)
def test_a_node_that_may_not_join_reads_why_and_so_does_the_operator(
    mesh: tuple[Processes, Process], case: str
) -> None:
    made, head = mesh
    module, name, arguments, sentence = CASES[case]
    node = made.start(module, "--head", made.address, "--node-id", name, *arguments)
    try:
        eventually("the node says so", lambda: sentence in node.output)
        eventually("the head says so too", lambda: f"node.refused on {name}: " in head.output)
        assert any("node.refused" in line and sentence in line for line in head.lines), head.output
        assert set(made.nodes()) == {"a"}
        assert text_of(made)
        assert case != "another version" or node.wait() != 0, "no waiting helps, so it ends"
    finally:
        if not node.has_ended:
            node.kill()
