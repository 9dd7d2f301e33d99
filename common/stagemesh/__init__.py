"""StageMesh: a gRPC microservice mesh that serves generative pipelines made of several models.

This module re-exports the Python client and `Mesh`. Names are imported at their first use, so that `import stagemesh`
costs nothing in processes that need none of them.
"""

# A star for type checkers alone; a test holds the list below against the client's.
# ruff: noqa: F403, F405

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stagemesh.client import *
    from stagemesh.client.mesh import AsyncMesh, Mesh
    from stagemesh.rpc.errors import MeshError, Reason

__version__ = "0.1.0"
__all__ = [
    "AbortResult",
    "AccessDenied",
    "AlreadyRunning",
    "AsyncClient",
    "AsyncMesh",
    "Audio",
    "AudioChunk",
    "Client",
    "Diffusion",
    "Finished",
    "Frame",
    "Image",
    "InternalError",
    "InvalidRequest",
    "Llm",
    "Media",
    "MediaInput",
    "Mesh",
    "MeshError",
    "NotFound",
    "Overloaded",
    "PipelineInfo",
    "Progress",
    "Reason",
    "Reference",
    "RequestAborted",
    "RequestTimeout",
    "StageFailed",
    "StageFinished",
    "StageInfo",
    "StageLost",
    "StageMeshError",
    "StartFailed",
    "TensorFrame",
    "TextDelta",
    "Timings",
    "TopLogprobs",
    "Transfer",
    "Unavailable",
    "Unreachable",
    "Unsupported",
    "Usage",
    "Video",
]
_ELSEWHERE = {
    "AsyncMesh": "stagemesh.client.mesh",
    "Mesh": "stagemesh.client.mesh",
    "MeshError": "stagemesh.rpc.errors",
    "Reason": "stagemesh.rpc.errors",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'stagemesh' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_ELSEWHERE.get(name, "stagemesh.client")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
