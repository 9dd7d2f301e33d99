"""Pipeline files, and the frozen pipeline they become."""

from stagemesh.config.errors import ConfigError, suggest
from stagemesh.config.load import Layers, Loaded, default_pipeline, load, load_pipeline
from stagemesh.config.model import Limits, Pipeline, Routing, Runtime, Stage, StageLimits

__all__ = [
    "ConfigError",
    "Layers",
    "Limits",
    "Loaded",
    "Pipeline",
    "Routing",
    "Runtime",
    "Stage",
    "StageLimits",
    "default_pipeline",
    "load",
    "load_pipeline",
    "suggest",
]
