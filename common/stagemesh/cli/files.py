"""The pipelines that a command is to serve, from its files and what is laid over them: the same for `up` and `head`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from stagemesh.config import Pipeline

_PANEL = "Configuration"

PipelineFiles = Annotated[
    list[Path] | None,
    typer.Argument(metavar="[PIPELINE]...", help="Pipeline files; without any, --model is served.", show_default=False),
]
ModelFolder = Annotated[
    Path | None,
    typer.Option(
        "--model",
        metavar="DIR",
        help="A model's folder: served as a pipeline of one stage; or, with files, for stages that name no model.",
    ),
]
PolicyName = Annotated[
    str,
    typer.Option(
        "--policy",
        metavar="NAME",
        help="Load balancing, over the files': least-queue-length, round-robin, random, power-of-two, "
        "prefix-affinity, or a plug-in's.",
        rich_help_panel=_PANEL,
    ),
]


@dataclass(frozen=True)
class PipelineSources:
    """Files or a model, and what is laid over them."""

    files: Sequence[Path] = ()
    model: Path | None = None
    stage_overrides: str = ""
    deploy_config: Sequence[Path] = ()
    engine_arg: Sequence[str] = ()
    platform: str = ""
    policy: str = ""
    stage_init_timeout: float | None = None
    default_sampling_params: str = ""

    def load(self) -> list[Pipeline]:
        """Read and check everything before anything starts.

        Raises:
            ConfigError: naming file, path, value, and what would be right.
            typer.BadParameter: files and --model do not fit together.
        """
        from stagemesh import config
        from stagemesh.config.overrides import parse_default_sampling, parse_engine_args, parse_stage_overrides

        if self.files and self.default_sampling_params:
            raise typer.BadParameter(
                "is for --model alone: files have their own", param_hint="--default-sampling-params"
            )
        options: config.Layers = {
            "overlays": self.deploy_config,
            "stage_overrides": parse_stage_overrides(self.stage_overrides) if self.stage_overrides else None,
            "engine_args": parse_engine_args(list(self.engine_arg)),
            "platform": self.platform,
            "policy": self.policy,
            "stage_init_timeout": self.stage_init_timeout,
        }
        if self.files:
            options["model"] = self.model
            loaded = [config.load_pipeline(path, **options) for path in self.files]
        elif self.model is not None:
            text = self.default_sampling_params
            sampling = parse_default_sampling(text) if text else None
            loaded = [config.default_pipeline(self.model, default_sampling_params=sampling, **options)]
        else:
            raise typer.BadParameter("give pipeline files, or --model DIR", param_hint="PIPELINE")
        names = [one.name for one in loaded]
        for name in names:
            if names.count(name) > 1:
                wrong = f"two of the files are named {name!r}: set `name` in one"
                raise typer.BadParameter(wrong, param_hint="PIPELINE")
        return loaded

    def arguments(self) -> list[str]:
        """The words by which another process loads the same."""
        words = [str(path) for path in self.files]
        words += ["--model", str(self.model)] if self.model is not None else []
        words += ["--stage-overrides", self.stage_overrides] if self.stage_overrides else []
        words += [word for path in self.deploy_config for word in ("--deploy-config", str(path))]
        words += [word for pair in self.engine_arg for word in ("--engine-arg", pair)]
        words += ["--platform", self.platform] if self.platform else []
        words += ["--policy", self.policy] if self.policy else []
        timeout = self.stage_init_timeout
        words += ["--stage-init-timeout", f"{timeout:g}"] if timeout is not None else []
        sampling = self.default_sampling_params
        words += ["--default-sampling-params", sampling] if sampling else []
        return words
