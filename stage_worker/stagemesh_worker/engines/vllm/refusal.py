"""vLLM's refusals of a value as the mesh's."""

from __future__ import annotations

from vllm.sampling_params import SamplingParams

from stagemesh.rpc.errors import MeshError, Reason

MISPLACED_MEDIA = "Failed to apply prompt"
"""How vLLM begins when a picture, sound or video has no place in the prompt; it is an AssertionError there."""


def refused(error: Exception, field: str | None = None) -> MeshError:
    """What vLLM says of a value, as INVALID_REQUEST that names the field where vLLM does."""
    message = Exception.__str__(error) or type(error).__name__
    field = field or getattr(error, "parameter", None)
    if field is None:
        first = message.split(maxsplit=1)[0].strip("`'\":,.") if message.strip() else ""
        field = first if first in SamplingParams.__struct_fields__ or first == "prompt" else None
    if field is None:
        return MeshError(Reason.INVALID_REQUEST, message)
    text = message if message.startswith(field) else f"{field}: {message}"
    return MeshError(Reason.INVALID_REQUEST, text, field=field)
