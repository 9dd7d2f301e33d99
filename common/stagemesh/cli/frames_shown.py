"""Frames for people: text as it is written, bars for steps, files and where the time went."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from stagemesh.cli.saving import SoundSaver, save_media
from stagemesh.cli.terminal import err, out, seconds
from stagemesh.client import frames as fr


class TerminalPrinter:
    """Text goes to standard output as it comes; bars and timings go to standard error."""

    def __init__(self, directory: Path, request_id: str) -> None:
        self._directory = directory
        self._request_id = request_id
        self._out: Console = out()
        self._text_stage = ""
        self._is_in_line = False
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=err(),
            transient=True,
            disable=not sys.stderr.isatty(),
        )
        self._bar_of: dict[str, TaskID] = {}
        self._steps_of: dict[str, int] = {}
        self._sounds = SoundSaver(directory, request_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()
        self._end_line()

    def show(self, frame: fr.Frame) -> None:
        """Print a frame."""
        match frame:
            case fr.TextDelta():
                self._text(frame)
            case fr.Progress():
                self._progress(frame)
            case fr.Media():
                self._saved(frame, save_media(frame, self._directory, self._request_id))
            case fr.AudioChunk():
                self._sound(frame)
            case fr.TensorFrame():
                self._line(f"{frame.stage}: {frame.name}: {frame.dtype} {list(frame.array.shape)}")
            case fr.StageFinished():
                self._stage_finished(frame)
            case fr.Finished():
                self._finished(frame)

    def _text(self, delta: fr.TextDelta) -> None:
        # Bars and half a line of text cannot share a terminal: the bars come back with the next step.
        self._bars.stop()
        speaker = delta.stage if not delta.index else f"{delta.stage} [{delta.index}]"
        if speaker != self._text_stage:
            self._end_line()
            self._out.print(f"{speaker}: ", style="bold cyan", end="", markup=False)
            self._text_stage = speaker
        self._out.file.write(_harmless(delta.text) if self._out.is_terminal else delta.text)
        self._out.file.flush()
        self._is_in_line = True

    def _progress(self, progress: fr.Progress) -> None:
        self._end_line()
        if progress.preview is not None:
            save_media(progress.preview, self._directory, self._request_id, kind=f"step{progress.step}-")
        self._steps_of[progress.stage] = progress.step
        self._bars.start()
        if progress.stage not in self._bar_of:
            self._bar_of[progress.stage] = self._bars.add_task(progress.stage, total=progress.total_steps or None)
        self._bars.update(self._bar_of[progress.stage], completed=progress.step, total=progress.total_steps or None)

    def _saved(self, media: fr.Media, path: Path) -> None:
        size = f"{media.width} × {media.height}, " if isinstance(media, fr.Image) and media.width else ""
        seed = f", seed {media.seed}" if media.seed is not None else ""
        self._line(f"{media.stage}: saved {path} ({size}{len(media.data):,} bytes{seed})")

    def _sound(self, chunk: fr.AudioChunk) -> None:
        if (saved := self._sounds.add(chunk)) is not None:
            self._saved(*saved)

    def _stage_finished(self, finished: fr.StageFinished) -> None:
        self._end_line()
        if (bar := self._bar_of.pop(finished.stage, None)) is not None:
            self._bars.remove_task(bar)
        if finished.recovery:
            self._line(f"{finished.stage}: a replica was lost; the output was {_RECOVERED[finished.recovery]}")

    def _finished(self, finished: fr.Finished) -> None:
        self._bars.stop()
        self._end_line()
        table = Table(box=None, pad_edge=False, header_style="dim")
        for name in ("stage", "replica", "wait", "first output", "total", "work"):
            table.add_column(name)
        ends = [(stage.stage, stage) for stage in finished.stages.values()]
        ends += [(f"{stage.stage} ({suffix})", stage) for suffix, stage in finished.companions.items()]
        for name, stage in ends:
            timings = stage.timings
            table.add_row(
                name,
                " → ".join(map(str, stage.replicas)),
                seconds(timings.queue_s + timings.engine_queue_s),
                seconds(timings.first_output_s),
                seconds(timings.total_s),
                _work(stage),
            )
        err().print(table)
        ending = "" if finished.finish_reason == "complete" else f" ({finished.finish_reason})"
        err().print(f"{self._request_id}: {seconds(finished.total_s)}{ending}", style="dim", markup=False)

    def _line(self, text: str) -> None:
        self._end_line()
        self._bars.stop()
        self._out.print(text, markup=False, soft_wrap=True)

    def _end_line(self) -> None:
        if self._is_in_line:
            self._out.file.write("\n")
            self._out.file.flush()
            self._is_in_line, self._text_stage = False, ""


_RECOVERED = {"exact": "resumed exactly", "continued": "continued with other words", "restarted": "made anew"}


def _harmless(text: str) -> str:
    """Without control characters: a model's text must not steer the terminal."""
    return "".join(letter for letter in text if letter.isprintable() or letter in "\n\t")


def _work(stage: fr.StageFinished) -> str:
    usage = stage.usage
    counts = [
        (usage.prompt_tokens, "prompt token"),
        (usage.completion_tokens, "token"),
        (usage.diffusion_steps, "step"),
        (usage.images, "picture"),
    ]
    words = [f"{count} {unit}{'s' * (count > 1)}" for count, unit in counts if count]
    if usage.completion_tokens and stage.timings.total_s:
        words.append(f"{usage.completion_tokens / stage.timings.total_s:.0f} tokens/s")
    if usage.audio_seconds:
        words.append(f"{usage.audio_seconds:.1f} s of sound")
    return ", ".join(words)
