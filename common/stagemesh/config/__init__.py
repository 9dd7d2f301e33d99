"""Pipeline files, and the frozen pipeline they become."""

from stagemesh.config.errors import ConfigError, suggest
from stagemesh.config.load import load_pipeline
from stagemesh.config.model import Limits, Pipeline, Routing, Runtime, Stage, StageLimits

__all__ = [
    "ConfigError",
    "Limits",
    "Pipeline",
    "Routing",
    "Runtime",
    "Stage",
    "StageLimits",
    "load_pipeline",
    "suggest",
]
