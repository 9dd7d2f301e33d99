"""Text from token ids: incremental, with stop texts, and the same across a cut anywhere."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from stagemesh_worker.engines.vllm.assembly import FastDecoder, SlowDecoder, TextAssembler

TEXTS = ("a red circle on a blue ground. stop here! ", "naïve 東京 🙂 ümlaut ")


def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


TOKENIZER = _tokenizer()


class _Wrapped:
    """A tokenizer that the tokenizers library is not behind, as far as `SlowDecoder` knows."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return TOKENIZER.decode(ids, skip_special_tokens=skip_special_tokens)


def _assembler(stop: tuple[str, ...] = (), include: bool = False, min_tokens: int = 0) -> TextAssembler:
    return TextAssembler(FastDecoder(TOKENIZER, [], True, True), stop=stop, include_stop=include, min_tokens=min_tokens)


def _run(assembler: TextAssembler, ids: list[int]) -> tuple[list[int], str, str | None]:
    taken: list[int] = []
    text = ""
    for token_id in ids:
        piece = assembler.push([token_id])
        taken += piece.token_ids
        text += piece.text
        if piece.stop is not None:
            return taken, text, piece.stop
    return taken, text + assembler.flush(), None


def test_text_of_single_tokens_adds_up_to_the_whole() -> None:
    for text in TEXTS:
        ids = TOKENIZER.encode(text).ids
        assert _run(_assembler(), ids) == (ids, text, None)


def test_a_character_is_never_cut() -> None:
    ids = TOKENIZER.encode("🙂").ids
    assert len(ids) > 1
    assembler = _assembler()
    assert [assembler.push([token_id]).text for token_id in ids] == [""] * (len(ids) - 1) + ["🙂"]


def test_stop_text_ends_the_text_before_it_and_drops_later_tokens() -> None:
    ids = TOKENIZER.encode("a red circle. stop here! more").ids
    taken, text, stop = _run(_assembler(("stop",)), ids)
    assert (text, stop) == ("a red circle. ", "stop")
    assert TOKENIZER.decode(taken).startswith("a red circle. stop")
    assert _assembler(("stop",)).push(ids).token_ids == taken


def test_stop_text_is_kept_when_asked_for() -> None:
    ids = TOKENIZER.encode("a red circle. stop here!").ids
    assert _run(_assembler(("stop",), include=True), ids)[1] == "a red circle. stop"


def test_stop_text_that_ends_first_wins() -> None:
    ids = TOKENIZER.encode("abcdef").ids
    assert _run(_assembler(("cdef", "bc")), ids)[2] == "bc"


def test_what_could_begin_a_stop_text_is_held_back() -> None:
    assembler = _assembler(("here!",))
    piece = assembler.push(TOKENIZER.encode("stop he").ids)
    assert piece.text == "sto"
    assert assembler.flush() == "p he"


def test_stop_text_within_min_tokens_does_not_count() -> None:
    ids = TOKENIZER.encode("stop stop").ids
    first = len(TOKENIZER.encode("stop").ids)
    assert _run(_assembler(("stop",), min_tokens=first), ids)[1] == "stop "


def test_stop_token_has_no_text_unless_asked_for() -> None:
    ids = TOKENIZER.encode("red blue").ids
    assert _assembler().push(ids, ends_with_stop_token=True).text == TOKENIZER.decode(ids[:-1])
    assert _assembler(include=True).push(ids, ends_with_stop_token=True).text == "red blue"


@given(
    ids=st.lists(st.integers(0, TOKENIZER.get_vocab_size() - 1), min_size=1, max_size=40),
    stop=st.lists(st.sampled_from(["a", "re", "st", " ", "🙂", "zz"]), max_size=2, unique=True).map(tuple),
    include=st.booleans(),
    min_tokens=st.integers(0, 10),
    data=st.data(),
)
def test_resume_anywhere_gives_the_same_text_and_tokens(ids, stop, include, min_tokens, data) -> None:
    """Lose the replica after any token; what the second one adds completes what the first one delivered."""
    taken, whole, stopped = _run(_assembler(stop, include, min_tokens), ids)
    cut = data.draw(st.integers(1, len(ids)))
    first = _assembler(stop, include, min_tokens)
    delivered, sent = [], ""
    for token_id in ids[:cut]:
        piece = first.push([token_id])
        delivered += piece.token_ids
        sent += piece.text
        if piece.stop is not None:
            break
    second = _assembler(stop, include, min_tokens)
    held = second.replay(delivered, len(sent), stopped=False)
    text, ids_after, stop_after = sent + held.text, list(delivered), held.stop
    if stop_after is None:
        more, rest, stop_after = _run(second, ids[cut:])
        ids_after += more
        text += rest
    assert (ids_after, text, stop_after) == (taken, whole, stopped)


@pytest.mark.parametrize("text", TEXTS)
def test_slow_decoder_makes_the_same_text_as_the_fast_one(text: str) -> None:
    ids = TOKENIZER.encode(text).ids
    assembler = TextAssembler(SlowDecoder(_Wrapped(), [], True))
    assert _run(assembler, ids)[1] == text
