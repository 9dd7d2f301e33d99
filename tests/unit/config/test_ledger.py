"""The memory of a device is added up before anything is started on it (C9)."""

from __future__ import annotations

import pytest

from stagemesh.config import ConfigError, Stage
from stagemesh.config.ledger import GIB, RESERVE_BYTES, Claim, check_ledger, claim_of, fits, show_ledger

CARD = 24 * GIB


@pytest.mark.parametrize(
    ("stage", "claim"),
    [
        (Stage(name="s"), Claim("s/3", share=0.92)),
        (Stage(name="s", engine_args={"gpu_memory_utilization": 0.4}), Claim("s/3", share=0.4)),
        (Stage(name="s", engine_args={"kv_cache_memory_bytes": GIB}), Claim("s/3", fixed_bytes=GIB)),
        (
            Stage(name="s", engine_args={"kv_cache_memory_bytes": GIB, "gpu_memory_utilization": 0.5}),
            Claim("s/3", fixed_bytes=GIB),
        ),
        (Stage(name="s", stage_type="diffusion"), Claim("s/3")),
        (Stage(name="s", engine="own", engine_args={"gpu_memory_utilization": 0.1}), Claim("s/3", share=0.1)),
        (Stage(name="s", engine="synthetic"), Claim("s/3")),
    ],
)  # fmt: skip
def test_claim_of_a_stage(stage: Stage, claim: Claim) -> None:
    assert claim_of(stage, 3) == claim


@pytest.mark.parametrize("share", ["half", -0.1, 1.5, True])
def test_share_that_is_none_is_refused(share: object) -> None:
    with pytest.raises(
        ConfigError, match=r"stages\[0\].engine_args.gpu_memory_utilization: .*want a share from 0 to 1"
    ):
        claim_of(Stage(name="s", engine_args={"gpu_memory_utilization": share}), 0)


def test_reserves_count() -> None:
    exactly = Claim("a/0", fixed_bytes=CARD - RESERVE_BYTES)
    assert fits(CARD, [exactly])
    assert not fits(CARD, [Claim("a/0", fixed_bytes=CARD - RESERVE_BYTES + 1)])
    assert not fits(CARD, [exactly, Claim("b/0")])


def test_what_does_not_fit_is_refused_with_the_ledger() -> None:
    claims = [Claim("llm/0", 0.8), Claim("tts/0", 0.3)]
    with pytest.raises(ConfigError) as caught:
        check_ledger("cuda:0", CARD, claims)
    assert str(caught.value) == (
        "cuda:0 has 24.00 GiB, asked for are 26.90: llm/0 19.45, tts/0 7.45; "
        "lower gpu_memory_utilization, or give the stages other devices"
    )
    check_ledger("cuda:0", CARD, claims[:1])


def test_nothing_is_refused_where_the_capacity_cannot_be_read() -> None:
    check_ledger("npu:0", 0, [Claim("a/0", 0.9), Claim("b/0", 0.9)])


def test_ledger_as_lines() -> None:
    assert show_ledger("cuda:0", CARD, [Claim("llm/0", 0.5), Claim("painter/0", fixed_bytes=6 * GIB)]) == [
        "cuda:0: llm/0        12.25 GiB  (50% of it + 0.25)",
        "cuda:0: painter/0     6.25 GiB  (6.00 GiB + 0.25)",
        "cuda:0: in all       18.50 GiB of 24.00",
    ]
