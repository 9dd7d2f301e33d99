"""`stagemesh generate`: one request, its text as it is written, its progress, its files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from stagemesh.addresses import DEFAULT_HEAD
from stagemesh.cli.options import HeadOption, JsonOption, PipelineOption
from stagemesh.cli.security import with_security


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(generate)


@with_security()
def generate(
    prompt: Annotated[str, typer.Argument(help="What to make. - or nothing: read it from standard input.")] = "-",
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Folder for pictures and sounds.")] = Path(),
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", "-s", metavar="STAGE.FIELD=VALUE", help="Sampling parameter of a stage; may be given often."
        ),
    ] = None,
    outputs: Annotated[
        list[str] | None,
        typer.Option(
            "--output", metavar="NAME", help="Only this output: text, image, audio, video, latent, or a stage's name."
        ),
    ] = None,
    negative: Annotated[str, typer.Option(help="What a picture must not show.")] = "",
    media: Annotated[
        list[str] | None,
        typer.Option(
            "--media", "-m", metavar="FILE", help="Picture, sound or video for the prompt, or its URL; more than once."
        ),
    ] = None,
    system: Annotated[str, typer.Option(help="System message: the prompt becomes a chat.")] = "",
    pipeline: PipelineOption = "",
    head: HeadOption = DEFAULT_HEAD,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Longest time for the whole request.")] = 600.0,
    request_id: Annotated[
        str, typer.Option("--id", metavar="ID", help="Id of the request, also in file names; made up unless given.")
    ] = "",
    final: Annotated[bool, typer.Option("--final", help="Text once it is complete, not as it grows.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Send a prompt through a pipeline.

    Text appears as it is written, a bar shows the steps of a picture, files go to --out as ID-STAGE-INDEX.png.

      [bold]stagemesh generate[/] "a red circle at night" --out out

      [bold]stagemesh generate[/] "a red circle" -s painter.seed=7 -s painter.num_inference_steps=30

      echo "a red circle" | [bold]stagemesh generate[/] --output text

    With --json every frame is a line of JSON; files are saved all the same, and the line has their path.
    """
    from stagemesh.cli.frames_json import JsonPrinter
    from stagemesh.cli.frames_shown import TerminalPrinter
    from stagemesh.cli.settings import parse_settings
    from stagemesh.client.prompts import MediaInput
    from stagemesh.client.sync import Client

    if prompt == "-":
        if sys.stdin.isatty():
            raise typer.BadParameter("give a prompt, or write one to standard input", param_hint="PROMPT")
        prompt = sys.stdin.read().strip()
    with Client(head) as client:
        description = client.get_pipeline(pipeline)
        name = request_id or _request_id()
        printer = JsonPrinter(out, name) if as_json else TerminalPrinter(out, name)
        frames = client.generate(
            [{"role": "system", "content": system}, {"role": "user", "content": prompt}] if system else prompt,
            sampling=parse_settings(settings or [], description),
            timeout=timeout,
            pipeline=description.name,
            outputs=outputs,
            negative=negative,
            media=[MediaInput(source) for source in media or []],
            mode="final" if final else "delta",
            request_id=name,
        )
        with printer:
            for frame in frames:
                printer.show(frame)


def _request_id() -> str:
    """An id that sorts by time and reads well in a file name."""
    import secrets
    import time

    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
