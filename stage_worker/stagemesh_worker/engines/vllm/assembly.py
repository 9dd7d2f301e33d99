"""Token ids -> text, one incremental detokenizer per completion, with stop texts.

It is primed with the prompt and fed every token the task ever made, also those made by a replica that was lost: a cut
inside a character, or inside a stop text, is never seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tokenizers.decoders import DecodeStream

_INCOMPLETE = "\ufffd"


class Decoder(Protocol):
    """Text of one token after the other; empty while a character is incomplete."""

    def step(self, token_id: int) -> str:
        """Text that `token_id` completes."""


class FastDecoder:
    """By the tokenizers library."""

    def __init__(self, tokenizer: Any, prompt_ids: Sequence[int], skip_special: bool, spaces_between: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._stream = DecodeStream(ids=list(prompt_ids), skip_special_tokens=skip_special)
        self._bare: dict[int, str] = {}
        self._last_special = False
        if not skip_special and not spaces_between:
            self._bare = {number: token.content for number, token in tokenizer.get_added_tokens_decoder().items()}

    def step(self, token_id: int) -> str:
        """Text that `token_id` completes."""
        try:
            text = self._stream.step(self._tokenizer, token_id) or ""
        except OverflowError:
            return ""  # no such id
        except Exception as error:
            if not str(error).startswith("Invalid prefix"):
                raise
            # Some byte sequences are no text at all and upset the stream: it starts anew, as vLLM's own does.
            self._stream = DecodeStream(skip_special_tokens=self._skip_special)
            text = self._stream.step(self._tokenizer, token_id) or ""
        if self._bare:
            special = self._bare.get(token_id)
            if special is not None and self._last_special:
                text = special
            self._last_special = special is not None
        return text


class SlowDecoder:
    """For tokenizers that the tokenizers library does not know: decodes a short window anew."""

    def __init__(self, tokenizer: Any, prompt_ids: Sequence[int], skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._ids = list(prompt_ids[-8:])
        self._before = self._decode()

    def _decode(self) -> str:
        return str(self._tokenizer.decode(self._ids, skip_special_tokens=self._skip_special))

    def step(self, token_id: int) -> str:
        """Text that `token_id` completes."""
        self._ids.append(token_id)
        whole = self._decode()
        if whole.endswith(_INCOMPLETE) or len(whole) < len(self._before):
            return ""
        made = whole[len(self._before) :]
        self._ids = self._ids[-8:]
        self._before = self._decode()
        return made


@dataclass(frozen=True, slots=True)
class Piece:
    """What some tokens added."""

    token_ids: list[int]
    """The tokens, without those after a stop text."""
    text: str
    stop: str | None = None
    """The stop text that ended the completion."""


class TextAssembler:
    """The text of one completion."""

    def __init__(
        self, decoder: Decoder | None, *, stop: Sequence[str] = (), include_stop: bool = False, min_tokens: int = 0
    ) -> None:
        """Without a `decoder` there is no text, as for a model without a tokenizer."""
        self._decoder = decoder
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._held_back = max(map(len, stop), default=1) - 1 if stop and not include_stop else 0
        self._text = ""
        self._sent = 0
        self.count = 0
        """Tokens so far."""

    def replay(self, token_ids: Sequence[int], text_chars: int, stopped: bool) -> Piece:
        """Take in what was made before; the piece's text is what the lost replica had still held back.

        Args:
            text_chars: characters that were delivered.
            stopped: the last token ends the output.
        """
        piece = self.push(token_ids, stopped)
        if not self._stop:
            return Piece([], piece.text[text_chars:])
        self._sent = min(text_chars, len(self._text))
        return Piece([], self._release(piece.stop is not None), piece.stop)

    def push(self, token_ids: Sequence[int], ends_with_stop_token: bool = False) -> Piece:
        """Add tokens; a stop token has no text unless it is to be included."""
        ids = list(token_ids)
        silent = 1 if ends_with_stop_token and not self._include_stop else 0
        step = self._decoder.step if self._decoder is not None else _no_text
        spoken = ids[: len(ids) - silent]
        if not self._stop:
            self.count += len(ids)
            return Piece(ids, step(spoken[0]) if len(spoken) == 1 else "".join([step(one) for one in spoken]))
        for number, token_id in enumerate(spoken, 1):
            before = len(self._text)
            self._text += step(token_id)
            self.count += 1
            if self.count > self._min_tokens and (found := self._find_stop(before)):
                stop, end = found
                self._text = self._text[:end]
                return Piece(ids[:number], self._release(True), stop)
        self.count += silent
        return Piece(ids, self._release(False))

    def flush(self) -> str:
        """Text that was held back in case a stop text began in it."""
        return self._release(True) if self._stop else ""

    def _find_stop(self, before: int) -> tuple[str, int] | None:
        """The stop text that ends first in what was added after `before`, and where the text is cut for it."""
        best: tuple[int, str] | None = None
        for stop in self._stop:
            place = self._text.find(stop, max(0, before - len(stop) + 1))
            if place >= 0 and (best is None or place + len(stop) < best[0]):
                best = place + len(stop), stop
        if best is None:
            return None
        end, stop = best
        return stop, end if self._include_stop else end - len(stop)

    def _release(self, everything: bool) -> str:
        end = len(self._text) - (0 if everything else self._held_back)
        if end <= self._sent:
            return ""
        made, self._sent = self._text[self._sent : end], end
        return made


def _no_text(token_id: int) -> str:
    return ""
