"""Control methods of the engine: an allow-list, with names as operators know them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from stagemesh_worker.engines.vllm.adapters import LoraAdapters

METHODS = frozenset(
    {
        "add_lora", "check_health", "is_paused", "is_sleeping", "list_loras", "pause", "pin_lora", "remove_lora",
        "reset_encoder_cache", "reset_mm_cache", "reset_prefix_cache", "resume", "sleep", "start_profile",
        "stop_profile", "wake_up",
    }
)  # fmt: skip

_RENAMED = {"pause": "pause_generation", "resume": "resume_generation"}


async def call(
    llm: Any,
    loras: LoraAdapters,
    check_health: Callable[[], Awaitable[None]],
    method: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Run one of `METHODS`, or else a method of the engine's workers, which gives a result of each.

    Raises TypeError for arguments it does not take, MeshError, or what the engine raises.
    """
    if method not in METHODS:
        return await llm.collective_rpc(method, args=tuple(args), kwargs=dict(kwargs))
    if method == "check_health":
        await check_health()
        return True
    if method == "list_loras":
        return loras.names_of(await llm.list_loras())
    if method in ("add_lora", "remove_lora", "pin_lora"):
        request = loras.request(*args, **kwargs)
        if method == "add_lora":
            return await llm.add_lora(request)
        return await getattr(llm, method)(request.lora_int_id)
    return await getattr(llm, _RENAMED.get(method, method))(*args, **kwargs)
