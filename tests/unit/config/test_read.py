"""Reading YAML: lines, numbers, dates, interpolation, and what is refused before it can do harm."""

from __future__ import annotations

import time

import pytest

from stagemesh.config import ConfigError
from stagemesh.config.read import MAX_NODES, parse_tree


def test_lines_are_those_of_the_keys() -> None:
    tree = parse_tree("a:\n  b:\n    - 1\n    - c: 2\n", "x.yaml")
    lines = {path: origin.line for path, origin in tree.origins.below(())}
    assert lines == {(): 1, ("a",): 1, ("a", "b"): 2, ("a", "b", 0): 3, ("a", "b", 1): 4, ("a", "b", 1, "c"): 4}
    assert str(tree.origins[("a", "b", 1, "c")]) == "x.yaml:4"


@pytest.mark.parametrize(
    ("written", "value"),
    [("1e-3", 0.001), ("1E5", 1e5), ("-2.5e+3", -2500.0), ("1_000", 1000), ("0.1", 0.1), ("2026-12-01", "2026-12-01"),
     ("'1e-3'", "1e-3"), ("1e", "1e"), ("~", None), ("off", False), ('"off"', "off"), ("0x10", 16)],
)  # fmt: skip
def test_scalars(written: str, value: object) -> None:
    read = parse_tree(f"a: {written}\n", "x.yaml").data["a"]
    assert read == value and type(read) is type(value)


def test_keys_are_texts() -> None:
    assert parse_tree("1: a\n2.5: b\n", "x.yaml").data == {"1": "a", "2.5": "b"}


def test_merge_keys_and_aliases() -> None:
    tree = parse_tree("base: &base {x: 1, y: 2}\nmine: {<<: *base, y: 3}\n", "x.yaml")
    assert tree.data["mine"] == {"x": 1, "y": 3}


def test_interpolation_and_its_escape() -> None:
    assert parse_tree("a: 4\nb: ${a}\nc: x ${a}\nd: '\\${a}'\n", "x.yaml").data == {
        "a": 4, "b": 4, "c": "x 4", "d": "${a}"
    }  # fmt: skip


@pytest.mark.parametrize("bomb", ["*a, *a, *a, *a, *a, *a, *a, *a, *a", "{<<: [*a, *a, *a, *a, *a, *a, *a, *a, *a]}"])
def test_aliases_that_grow_without_end_are_refused_at_once(bomb: str) -> None:
    lines = ["a0: &a0 {x: 1}"] + [f"a{i}: &a{i} [{bomb.replace('*a', f'*a{i - 1}')}]" for i in range(1, 12)]
    before = time.monotonic()
    with pytest.raises(ConfigError, match=f"has more than {MAX_NODES} values"):
        parse_tree("\n".join(lines), "x.yaml")
    assert time.monotonic() - before < 10


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ("a: &a [*a]\n", "is nested deeper than 32 levels"),
        ("a: !!binary aGk=\n", "x.yaml:1: a: b'hi': want a text, a number, true, false, null, a list or a mapping"),
        ("a: !!set {x, y}\n", "x.yaml:1: a: {"),
        ("? [a, b]\n: 1\n", "x.yaml:1: not YAML: found unhashable key"),
        ("a: 1\n--- \nb: 2\n", "x.yaml:2: not YAML: but found another document"),
        ("a: 'x\n", "x.yaml:2: not YAML: found unexpected end of stream"),
        ("a: b: c\n", "x.yaml:1: not YAML: mapping values are not allowed here"),
        ("- a\n", "x.yaml: ['a']: is not a mapping; a pipeline file is a mapping with `stages`"),
        ("a: .inf\n", "x.yaml:1: a: inf: want a finite number"),
        ("a: 1e999\n", "x.yaml:1: a: inf: want a finite number"),
        ("a: [1, '???']\n", "x.yaml:1: a[1]: '???': is left open; fill it in"),
        ('a: "\\0"\nb: ${oc.env:NO_SUCH_VARIABLE}\n', "Environment variable 'NO_SUCH_VARIABLE' not found"),
        ("a: ${b\n", "x.yaml: a: "),
        ("a: {b: 1, b: 2}\n", "x.yaml:1: 'b' is written twice, on line 1; keep one"),
    ],
)
def test_what_is_refused(written: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_tree(written, "x.yaml")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_tags_construct_nothing() -> None:
    with pytest.raises(ConfigError, match="could not determine a constructor"):
        parse_tree("a: !!python/object/apply:os.system ['true']", "x.yaml")


def test_tab_inside_quotes_is_a_tab() -> None:
    assert parse_tree("a: 'b\tc'\n", "x.yaml").data == {"a": "b\tc"}
    with pytest.raises(ConfigError, match=r"x.yaml:1: a tab outside of quotes; want a space, or quotes around it"):
        parse_tree("a: b\tc\n", "x.yaml")
