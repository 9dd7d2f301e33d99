"""The simulation of `benchmarks/routing.py` obeys its own laws, and what `docs/routing.md` says holds in it."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))

from routing import WORLDS, Figures, Mesh, World, measure, plot, requests_of  # noqa: E402

from stagemesh_head.routing.registry import BUILT_IN  # noqa: E402

BY_NAME = {world.name: world for world in WORLDS}


@cache
def figures(world: str, policy: str) -> Figures:
    return measure(BY_NAME[world], policy, 6000, range(2))


# -- the simulation -------------------------------------------------------------
def test_a_seed_gives_the_same_figures_again() -> None:
    world = BY_NAME["shared prefixes"]
    assert measure(world, "power-of-two", 500, [3]) == measure(world, "power-of-two", 500, [3])
    assert measure(world, "power-of-two", 500, [3]) != measure(world, "power-of-two", 500, [4])


@pytest.mark.parametrize("policy", BUILT_IN)
def test_every_request_is_served_once_and_no_view_keeps_one(policy: str) -> None:
    world = BY_NAME["shared prefixes"]
    requests = requests_of(world, 800, seed=1)
    mesh = Mesh(world, policy, seed=1)
    mesh.run(requests)
    shortest = min(request.decode_s for request in requests)
    assert all(request.done_at - request.at >= shortest for request in requests)
    assert [replica.tasks for replica in mesh.replicas] == [0] * len(world.speeds)
    assert {seat.inflight for view in mesh.views for seat in view} == {0}
    assert all(len(replica.cache) <= world.cached for replica in mesh.replicas)


def test_slots_fill_as_the_load_says() -> None:
    # Little's law: without a cache, the mean number of slots in use is the work that comes in a second.
    for load in (0.4, 0.7):
        world = replace(BY_NAME["8 gateways"], load=load)
        assert measure(world, "power-of-two", 6000, range(2)).utilisation == pytest.approx(load, rel=0.06)


def test_a_lone_request_takes_its_work_over_the_speed_and_a_computed_beginning_is_spared() -> None:
    world = World("lone", speeds=(0.5,), slots=1, prefixes=1, load=0.01)
    first, second = requests_of(world, 2, seed=0)
    second.at = first.at + 1000
    Mesh(world, "random", seed=0).run([first, second])
    assert first.done_at - first.at == pytest.approx((0.5 + 0.05 + first.decode_s) / 0.5)
    assert second.done_at - second.at == pytest.approx((0.05 + second.decode_s) / 0.5)
    assert (first.was_hit, second.was_hit) == (False, True)


# -- what the page says -----------------------------------------------------------
@pytest.mark.parametrize("better", ["power-of-two", "prefix-affinity"])
@pytest.mark.parametrize("world", BY_NAME)
def test_two_choices_and_affinity_beat_random_on_the_tail_in_every_world(world: str, better: str) -> None:
    assert figures(world, better).p99_s < figures(world, "random").p99_s


def test_the_least_queue_is_the_most_even_and_quickest_with_one_head() -> None:
    best = figures("one head", "least-queue-length")
    for other in set(BUILT_IN) - {"least-queue-length"}:
        assert best.imbalance < figures("one head", other).imbalance
        assert best.p50_s < figures("one head", other).p50_s


def test_the_least_queue_herds_when_many_gateways_follow_the_same_stale_reports() -> None:
    herd, two = figures("32 gateways", "least-queue-length"), figures("32 gateways", "power-of-two")
    assert herd.imbalance > 1.2 * two.imbalance
    assert herd.p50_s > 1.4 * two.p50_s
    assert herd.p99_s > 1.1 * two.p99_s


def test_policies_that_are_blind_to_load_drown_slow_replicas() -> None:
    for blind in ("random", "round-robin"):
        assert figures("unequal replicas", blind).p99_s > 3 * figures("unequal replicas", "power-of-two").p99_s


def test_affinity_hits_most_and_needs_the_fewest_slots_when_prompts_share_beginnings() -> None:
    best = figures("shared prefixes", "prefix-affinity")
    for other in set(BUILT_IN) - {"prefix-affinity"}:
        assert best.hit_rate > 1.5 * figures("shared prefixes", other).hit_rate
        assert best.utilisation < 0.9 * figures("shared prefixes", other).utilisation
        assert best.p50_s < figures("shared prefixes", other).p50_s


def test_affinity_of_many_gateways_piles_up_on_the_replicas_of_hot_beginnings() -> None:
    affine = figures("shared prefixes, 32 gateways", "prefix-affinity")
    two = figures("shared prefixes, 32 gateways", "power-of-two")
    assert affine.imbalance > 1.5 * two.imbalance
    assert affine.p99_s > two.p99_s
    assert affine.p50_s < two.p50_s


# -- what people see ----------------------------------------------------------------
def test_the_plot_is_an_svg_with_a_line_for_every_policy_in_every_panel() -> None:
    document = ElementTree.fromstring(plot(list(BUILT_IN), 200, range(1)))
    lines = [p for p in document.iter("{http://www.w3.org/2000/svg}path") if p.get("stroke-width") == "2.2"]
    assert len(lines) == len(BUILT_IN) * (3 + 1)  # three panels and the legend
    assert all(re.fullmatch(r"M[\d.L ]+", p.get("d", "")) for p in lines)


def test_the_page_has_a_row_for_every_world_and_policy() -> None:
    page = (ROOT / "docs" / "routing.md").read_text()
    rows = {(world, policy) for world, policy in re.findall(r"^\| ([^|]+) \| ([a-z-]+) \| [\d.]+ \|", page, re.M)}
    assert rows == {(world, policy) for world in BY_NAME for policy in BUILT_IN}
