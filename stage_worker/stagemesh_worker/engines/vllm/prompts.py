"""What an adapter made -> vLLM's own form of a prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.inputs import TokensPrompt
from vllm.inputs.engine import embeds_input, tokens_input

from stagemesh.rpc.errors import MeshError, Reason, invalid
from stagemesh.v1 import stage_pb2 as stage_pb
from stagemesh_worker.engines.base import EngineInput
from stagemesh_worker.engines.vllm.assembly import Decoder, FastDecoder, SlowDecoder
from stagemesh_worker.engines.vllm.media import MediaReader

LONG_TEXT_CHARS = 8192
"""Longer texts are tokenized on a thread: they would hold the event loop for over a millisecond."""


@dataclass(frozen=True, slots=True)
class BuiltPrompt:
    """A prompt as the engine takes it."""

    value: Any
    """What `AsyncLLM.generate` takes."""
    token_ids: tuple[int, ...]
    """Its ids, without those of a resume; empty for embeddings."""
    length: int
    """Tokens of the prompt, without those of a resume; media count as their placeholders."""


class PromptBuilder:
    """Tokenizes with the model's own tokenizer and chat template."""

    def __init__(self, tokenizer: Any, model_config: Any, media: MediaReader) -> None:
        """`tokenizer` may be None, for a model without one."""
        self._media = media
        self._tokenizer = tokenizer
        self._model = model_config
        self._backend = getattr(tokenizer, "_tokenizer", None)
        # Two threads must not use one tokenizer at a time.
        self._lock = asyncio.Lock()

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output together that the model takes."""
        return int(self._model.max_model_len)

    def decoder(self, prompt_ids: Sequence[int], skip_special: bool, spaces_between: bool) -> Decoder | None:
        """A detokenizer for what follows `prompt_ids`."""
        if self._tokenizer is None:
            return None
        if self._backend is not None and hasattr(self._backend, "get_added_tokens_decoder"):
            return FastDecoder(self._backend, prompt_ids, skip_special, spaces_between)
        return SlowDecoder(self._tokenizer, prompt_ids, skip_special)

    async def build(self, given: EngineInput, task: stage_pb.SubmitTask, truncate: int | None = None) -> BuiltPrompt:
        """The prompt of a task, followed by the tokens that it resumes from.

        Args:
            truncate: keep only so many of the last tokens; -1: as many as the model takes.

        Raises:
            MeshError: INVALID_REQUEST or PROMPT_TOO_LARGE.
        """
        salt = task.cache_salt or None
        if given.embeds is not None:
            return self._embeds(given.embeds, salt)
        ids = await self._token_ids(given)
        if truncate is not None:
            if truncate == 0 or truncate < -1:
                raise invalid("truncate_prompt_tokens", truncate, "want 1 or more, or -1 for the model's limit")
            ids = ids[-(self._model.max_model_len - 1 if truncate == -1 else truncate) :]
        self._check(ids, bool(given.media))
        everything = [*ids, *task.resume_token_ids]
        if not given.media:
            return BuiltPrompt(tokens_input(everything, cache_salt=salt), tuple(ids), len(ids))
        data, keys = await self._media.read(given.media, task.cache_salt)
        value = TokensPrompt(prompt_token_ids=everything, multi_modal_data=data, multi_modal_uuids=dict(keys))
        if salt is not None:
            value["cache_salt"] = salt
        return BuiltPrompt(value, tuple(ids), len(ids))

    async def chunk(self, given: EngineInput, salt: str | None) -> BuiltPrompt:
        """A further chunk of input, which continues a context. Raises MeshError as `build`."""
        if given.embeds is not None or given.media:
            raise invalid("prompt", "embeds or media", "a further chunk of input is text or tokens")
        if given.text is not None:
            ids = await self._encode(given.text, special=False)
        else:
            ids = await self._token_ids(given)
        self._check(ids, False)
        return BuiltPrompt(tokens_input(list(ids), cache_salt=salt), tuple(ids), len(ids))

    def _check(self, ids: Sequence[int], has_media: bool) -> None:
        if not ids:
            raise invalid("prompt", "", "has no tokens")
        limit = self._model.max_model_len - 1
        if len(ids) > limit and not has_media:
            raise MeshError(
                Reason.PROMPT_TOO_LARGE,
                f"prompt: has {len(ids)} tokens; the model takes at most {limit} and one of output",
                field="prompt",
                tokens=len(ids),
                limit=limit,
            )
        vocabulary = self._model.get_vocab_size()
        if (largest := max(ids)) >= vocabulary:
            raise invalid("prompt.tokens", largest, f"the model's token ids are below {vocabulary}")

    def _embeds(self, array: Any, salt: str | None) -> BuiltPrompt:
        import torch

        if not self._model.enable_prompt_embeds:
            raise invalid("prompt.embeds", "set", "the stage must have `engine_args.enable_prompt_embeds: true`")
        hidden = self._model.get_inputs_embeds_size()
        if array.ndim != 2 or array.shape[1] != hidden or not array.shape[0]:
            raise invalid("prompt.embeds", list(array.shape), f"want [tokens, {hidden}]")
        # The mapped array is read-only, and vLLM sends it on without changing it.
        tensor = torch.from_numpy(array.copy()).to(self._model.dtype)
        return BuiltPrompt(embeds_input(tensor, cache_salt=salt), (), int(array.shape[0]))

    async def _token_ids(self, given: EngineInput) -> list[int]:
        if given.token_ids is not None:
            return list(given.token_ids)
        if self._tokenizer is None:
            raise invalid("prompt", "text", "the model has no tokenizer: give token ids")
        if given.messages is not None:
            text = self._render(given)
            return await self._encode(text, special=False)
        return await self._encode(given.text or "", special=True)

    def _render(self, given: EngineInput) -> str:
        messages: list[dict[str, Any]] = [dict(message) for message in given.messages or ()]
        if given.media and messages:
            # Templates of multimodal models put their own placeholders where a part is not text.
            parts = [{"type": item.modality} for item in given.media]
            messages[-1]["content"] = [*parts, {"type": "text", "text": messages[-1]["content"]}]
        try:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        except Exception as error:  # templates raise whatever they like
            raise invalid("prompt.chat", "messages", f"the model's chat template refuses them: {error}") from error

    async def _encode(self, text: str, *, special: bool) -> list[int]:
        if len(text) < LONG_TEXT_CHARS and not self._lock.locked():
            return list(self._tokenizer.encode(text, add_special_tokens=special))
        async with self._lock:
            return list(await asyncio.to_thread(self._tokenizer.encode, text, add_special_tokens=special))
