"""Whatever a file holds, loading raises nothing but our own error, in one line, which names the file."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from stagemesh.config import ConfigError, Layers, load
from tests.unit.config.conftest import FILES

KEYS = (
    "stages", "name", "runtime", "inputs", "stage_id", "engine_args", "stage_args", "platforms", "edges", "base_config",
    "devices", "limits", "routing", "edge", "model", "parallel_config", "kv_transfer_config", "num_replicas", "cuda",
    "is_prefill_only", "is_decode_only", "default_sampling_params", "input_adapter", "async_chunk", "policy",
)  # fmt: skip
TREES = {path.name: yaml.safe_load(path.read_text()) for path in sorted(FILES.glob("*.yaml"))}
text = st.text(max_size=12)
keys = st.sampled_from(KEYS) | text
number = st.integers(-(2**70), 2**70) | st.floats()
scalar = st.none() | st.booleans() | number | text | st.sampled_from(["a.b", "0,1", "auto", "${x}", "${stages}", "???"])
junk = st.recursive(
    scalar, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4), max_leaves=12
)


def places(tree: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """All places of a tree."""
    yield path
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield from places(value, (*path, key))


@st.composite
def damaged(draw: st.DrawFn) -> tuple[str, Any]:
    """One of our files with junk in one to three places: it gets further than junk alone."""
    name = draw(st.sampled_from(sorted(TREES)))
    tree = deepcopy(TREES[name])
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(list(places(tree))))
        value = draw(junk)
        if not path:
            return name, value
        holder = tree
        for part in path[:-1]:
            holder = holder[part]
        if isinstance(holder, dict) and draw(st.booleans()):
            holder[draw(keys)] = value
        else:
            holder[path[-1]] = value
    return name, tree


def load_junk(written: str, **layers: Any) -> None:
    """Load a text as a pipeline, and as an overlay of one."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "junk.yaml"
        path.write_bytes(written.encode("utf-8", "surrogatepass"))
        base = Path(folder) / "base.yaml"
        base.write_text("stages:\n- {name: a, model: m}\n- {name: b, model: m, stage_type: diffusion}\n")
        for attempt in ((path, Layers(**layers)), (base, Layers(**layers, overlays=[path]))):
            try:
                load(attempt[0], **attempt[1])
            except ConfigError as error:
                assert "junk.yaml" in str(error) or "base.yaml" in str(error) or error.file.startswith("--")
                assert str(error).isprintable()


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(keys, junk, max_size=5))
def test_trees_of_junk(tree: dict[str, Any]) -> None:
    load_junk(yaml.safe_dump(tree, allow_unicode=True), platform="cuda", model="m")


@settings(max_examples=300, deadline=None)
@given(damaged())
def test_files_with_damage(case: tuple[str, Any]) -> None:
    _, tree = case
    load_junk(yaml.safe_dump(tree, allow_unicode=True), platform="npu", model="m")


@settings(max_examples=150, deadline=None)
@given(
    st.text(max_size=80)
    | st.sampled_from(
        ["a: [", "&a [*a]", "? {x}", "- !!python/object:os.system {}", "a: ${b}", "a: !!int x", "%YAML 3.0"]
    )
)
def test_texts_of_junk(written: str) -> None:
    load_junk(written)


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(st.sampled_from(["a", "0", "b", "1"]) | text, st.dictionaries(keys, junk, max_size=3), max_size=2)
)
def test_overrides_of_junk(overrides: dict[str, Any]) -> None:
    load_junk("stages:\n- {name: a, model: m}\n- {name: b, model: m}\n", stage_overrides=overrides)


@pytest.mark.parametrize("raw", [b"\xff\xfe", b"\x00", b"a: \xe9", b"\xef\xbb\xbfstages: []"])
def test_bytes_of_junk(raw: bytes, tmp_path: Path) -> None:
    path = tmp_path / "junk.yaml"
    path.write_bytes(raw)
    with pytest.raises(ConfigError, match=r"junk\.yaml"):
        load(path)


@pytest.mark.parametrize("name", ["", "no\x00file", "x" * 5000, "."])
def test_names_of_junk(name: str) -> None:
    with pytest.raises(ConfigError):
        load(name)
