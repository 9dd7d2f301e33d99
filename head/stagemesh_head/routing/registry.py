"""Policies by name: the built-in ones and those of other distributions."""

from __future__ import annotations

from importlib.metadata import entry_points

from stagemesh_head.routing.affinity import PrefixAffinity
from stagemesh_head.routing.policies import (
    LeastQueueLength,
    Policy,
    PolicyFactory,
    PowerOfTwo,
    Random,
    RoundRobin,
)

ENTRY_POINT_GROUP = "stagemesh.policies"
"""A distribution adds a policy by an entry point of this group: name = "package.module:Class"."""

BUILT_IN: dict[str, PolicyFactory] = {
    "random": Random,
    "round-robin": RoundRobin,
    "least-queue-length": LeastQueueLength,
    "power-of-two": PowerOfTwo,
    "prefix-affinity": PrefixAffinity,
}


def make_policy(name: str) -> Policy:
    """A new policy of that name.

    Raises:
        ValueError: there is none; the text lists those that there are.
    """
    if factory := BUILT_IN.get(name):
        return factory()
    plugins = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    if point := plugins.get(name):
        policy = point.load()()
        if not isinstance(policy, Policy):
            raise ValueError(f"routing.policy: {name!r}: {point.value} is not a stagemesh_head.routing.policies.Policy")
        return policy
    raise ValueError(f"routing.policy: {name!r}: unknown; policies are {', '.join(sorted({*BUILT_IN, *plugins}))}")
