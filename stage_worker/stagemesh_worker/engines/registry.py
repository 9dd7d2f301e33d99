"""Engine names -> engine classes, imported only when one is used.

Other distributions add engines by an entry point of the group `stagemesh.engines`, name = "package.module:Class". A
pipeline file may also name a class by its path: "package.module:Class", or "file.py:Class" relative to the file.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from stagemesh.config import suggest
from stagemesh.config.dotted import import_dotted
from stagemesh_worker.engines.base import Engine, EngineConfigError

ENTRY_POINT_GROUP = "stagemesh.engines"
BUILT_IN: dict[str, str] = {
    "vllm": "stagemesh_worker.engines.vllm.engine:VllmEngine",
    "diffusion": "stagemesh_worker.engines.diffusion.engine:DiffusionEngine",
    "synthetic": "stagemesh_worker.engines.synthetic.engine:SyntheticEngine",
}
_EXTRAS = {"vllm": "llm-cpu (or llm-gpu)", "diffusion": "diffusion"}


def engine_names() -> list[str]:
    """Names that `engine_class` knows, sorted. A built-in name wins over a plug-in's."""
    return sorted({*BUILT_IN, *_plug_ins()})


def engine_class(name: str) -> type[Engine]:
    """The class of an engine, by its name or path.

    Raises:
        EngineConfigError: no such engine, its package is not installed, or it cannot be imported.
    """
    target = BUILT_IN.get(name) or _plug_ins().get(name)
    if target is None and ":" in name:
        target = name
    if target is None:
        names = engine_names()
        hint = "; ".join(filter(None, (f"want one of {', '.join(names)}", suggest(name, names))))
        raise EngineConfigError(f"engine: {name!r}: unknown; {hint}")
    try:
        found = import_dotted(target) if isinstance(target, str) else target.load()
    except ImportError as error:
        extra = f": pip install 'stagemesh[{_EXTRAS[name]}]'" if name in _EXTRAS else ""
        raise EngineConfigError(f"engine: {name!r} cannot be imported here ({error}){extra}") from error
    except Exception as error:
        if name in BUILT_IN:
            raise
        raise EngineConfigError(f"engine: {name!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Engine)):
        raise EngineConfigError(f"engine: {name!r}: {found!r} is not a subclass of stagemesh_worker.engines.Engine")
    return found


def _plug_ins() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}
