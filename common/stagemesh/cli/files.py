"""The pipelines that a command is to serve, from its files and what is laid over them: the same for `up` and `head`."""

from __future__ import annotations

from collections.abc import Sequence
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


def load_pipelines(
    files: Sequence[Path],
    model: Path | None,
    *,
    stage_overrides: str = "",
    deploy_config: Sequence[Path] = (),
    engine_arg: Sequence[str] = (),
    platform: str = "",
    policy: str = "",
    stage_init_timeout: float | None = None,
    default_sampling_params: str = "",
) -> list[Pipeline]:
    """Read and check everything before anything starts.

    Raises:
        ConfigError: naming file, path, value, and what would be right.
        typer.BadParameter: files and --model do not fit together.
    """
    from stagemesh import config
    from stagemesh.config.overrides import parse_default_sampling, parse_engine_args, parse_stage_overrides

    if not files and model is None:
        raise typer.BadParameter("give pipeline files, or --model DIR", param_hint="PIPELINE")
    if files and default_sampling_params:
        raise typer.BadParameter("is for --model alone: files have their own", param_hint="--default-sampling-params")
    options: config.Layers = {
        "overlays": deploy_config,
        "stage_overrides": parse_stage_overrides(stage_overrides) if stage_overrides else None,
        "engine_args": parse_engine_args(list(engine_arg)),
        "platform": platform,
        "policy": policy,
        "stage_init_timeout": stage_init_timeout,
    }
    if files:
        options["model"] = model
        loaded = [config.load_pipeline(path, **options) for path in files]
    else:
        assert model is not None
        sampling = parse_default_sampling(default_sampling_params) if default_sampling_params else None
        loaded = [config.default_pipeline(model, default_sampling_params=sampling, **options)]
    names = [one.name for one in loaded]
    for name in names:
        if names.count(name) > 1:
            raise typer.BadParameter(f"two of the files are named {name!r}: set `name` in one", param_hint="PIPELINE")
    return loaded


def arguments(
    files: Sequence[Path],
    model: Path | None,
    *,
    stage_overrides: str = "",
    deploy_config: Sequence[Path] = (),
    engine_arg: Sequence[str] = (),
    platform: str = "",
    policy: str = "",
    stage_init_timeout: float | None = None,
    default_sampling_params: str = "",
) -> list[str]:
    """The words by which another process loads the same."""
    words = [str(path) for path in files]
    words += ["--model", str(model)] if model is not None else []
    words += ["--stage-overrides", stage_overrides] if stage_overrides else []
    words += [word for path in deploy_config for word in ("--deploy-config", str(path))]
    words += [word for pair in engine_arg for word in ("--engine-arg", pair)]
    words += ["--platform", platform] if platform else []
    words += ["--policy", policy] if policy else []
    words += ["--stage-init-timeout", f"{stage_init_timeout:g}"] if stage_init_timeout is not None else []
    words += ["--default-sampling-params", default_sampling_params] if default_sampling_params else []
    return words
