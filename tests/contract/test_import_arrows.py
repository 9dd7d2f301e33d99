"""Who may import whom: common knows neither side, the sides never meet, and inside the head data flows one way."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "stagemesh": ROOT / "common/stagemesh",
    "stagemesh_head": ROOT / "head/stagemesh_head",
    "stagemesh_worker": ROOT / "stage_worker/stagemesh_worker",
}
HEAVY = {"torch", "vllm", "diffusers", "transformers"}

FORBIDDEN = {
    "stagemesh": ("stagemesh_head", "stagemesh_worker"),
    "stagemesh_head": ("stagemesh_worker",),
    "stagemesh_worker": ("stagemesh_head",),
    # Inside the head: services -> orchestration -> routing -> registry; links at the side.
    "stagemesh_head.registry": tuple(
        f"stagemesh_head.{room}" for room in ("routing", "orchestration", "services", "links", "app", "http")
    ),
    "stagemesh_head.routing": tuple(
        f"stagemesh_head.{room}" for room in ("orchestration", "services", "app", "http")
    ),
    "stagemesh_head.orchestration": ("stagemesh_head.services", "stagemesh_head.app", "stagemesh_head.http"),
    "stagemesh_head.links": tuple(
        f"stagemesh_head.{room}" for room in ("orchestration", "services", "app", "http")
    ),
    "stagemesh_head.services": ("stagemesh_head.app",),
    # Inside the worker: the node agent and the engines do not know each other.
    "stagemesh_worker.node": ("stagemesh_worker.engines", "stagemesh_worker.adapters", "stagemesh_worker.app"),
    "stagemesh_worker.engines": ("stagemesh_worker.node", "stagemesh_worker.replica", "stagemesh_worker.app"),
}


def modules(package: str) -> Iterator[tuple[str, Path]]:
    root = PACKAGES[package.split(".")[0]]
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join((package.split(".")[0], *(p for p in parts if p != "__init__")))
        if (name == package or name.startswith(package + ".")) and ".v1." not in name:
            yield name, path


def imports(name: str, path: Path, *, only_at_start: bool = False) -> Iterator[str]:
    """Absolute names imported by a module; `only_at_start` leaves out those inside functions."""
    tree = ast.parse(path.read_text())
    nodes = list(_top_level(tree)) if only_at_start else list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
                base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _top_level(tree: ast.Module) -> Iterator[ast.AST]:
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        yield node
        is_typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if isinstance(node, ast.If | ast.Try | ast.With) and not is_typing_only:
            pending.extend(ast.iter_child_nodes(node))


@pytest.mark.parametrize("package", FORBIDDEN)
def test_package_imports_nothing_it_must_not_know(package: str) -> None:
    wrong = [
        f"{name} imports {imported}"
        for name, path in modules(package)
        for imported in imports(name, path)
        for forbidden in FORBIDDEN[package]
        if imported == forbidden or imported.startswith(forbidden + ".")
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", ["stagemesh", "stagemesh_head", "stagemesh_worker.node"])
def test_package_never_imports_an_engine_library(package: str) -> None:
    wrong = [
        f"{name} imports {imported}"
        for name, path in modules(package)
        for imported in imports(name, path)
        if imported.split(".")[0] in HEAVY
    ]
    assert not wrong, "\n".join(wrong)


def test_every_package_has_modules_to_check() -> None:
    assert all(len(list(modules(package))) > 0 for package in FORBIDDEN)
