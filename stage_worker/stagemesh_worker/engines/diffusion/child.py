"""The process that computes: loads one pipeline and runs jobs, started as `python -m ...diffusion.child`.

Its first line on stdin is its configuration; the pipe then stays open, and its end means that the engine is gone.
Standard output and error are lines for people.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
from zmq.constants import SocketType
from zmq.sugar.context import Context

from stagemesh.launch.parentage import die_with_parent
from stagemesh_worker.engines.base import EngineConfigError
from stagemesh_worker.engines.diffusion.facts import PipelineFacts
from stagemesh_worker.engines.diffusion.options import DiffusionOptions
from stagemesh_worker.engines.diffusion.protocol import (
    HIGH_WATER_MARK,
    Abort,
    Call,
    Failed,
    Item,
    ItemEnded,
    JobEnded,
    Message,
    Output,
    Ready,
    Result,
    Run,
    Step,
    decode,
    encode,
)

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

    from stagemesh_worker.engines.diffusion.adapters import LoraAdapters

EXIT_FAILED = 3


class _JobAborted(Exception):
    """Nobody waits for this call of the pipeline any more."""


class Wire:
    """The child's end of the socket."""

    def __init__(self, address: str) -> None:
        self._context = Context()
        self._socket = self._context.socket(SocketType.DEALER)
        self._socket.set_hwm(HIGH_WATER_MARK)
        self._socket.connect(address)

    def send(self, message: Message) -> None:
        """Send, waiting while the engine does not read."""
        self._socket.send_multipart(encode(message), copy=False)

    def receive(self, timeout_ms: int | None) -> Message | None:
        """The next message, or None after the time; None waits for ever."""
        if not self._socket.poll(timeout_ms):
            return None
        return decode(self._socket.recv_multipart())

    def close(self) -> None:
        """Close, after a moment for what was sent last."""
        self._socket.close(linger=1000)
        self._context.term()


class Worker:
    """Runs jobs one after the other, and hears aborts between the steps."""

    def __init__(self, wire: Wire, pipe: DiffusionPipeline, facts: PipelineFacts, loras: LoraAdapters) -> None:
        self._wire = wire
        self._pipe = pipe
        self._facts = facts
        self._loras = loras
        self._later: deque[Message] = deque()
        self._job: frozenset[int] = frozenset()
        """Items of the job at hand."""
        self._aborted: set[int] = set()
        self._previews_work = True

    def serve(self) -> None:
        """Work until the process is ended."""
        while True:
            message = self._later.popleft() if self._later else self._wire.receive(None)
            if isinstance(message, Run):
                self._job, self._aborted = frozenset(item.item for item in message.items), set()
                self._run(message)
                self._wire.send(JobEnded())
            elif isinstance(message, Call):
                self._wire.send(self._answer(message))
            # An Abort that comes between jobs is of an item that has ended already.

    # -------------------------------------------------------------- jobs
    def _run(self, run: Run) -> None:
        from stagemesh_worker.engines.diffusion.adapters import AdapterError
        from stagemesh_worker.engines.diffusion.generation import InvalidCallError, call_pipeline, items_alone

        steps = 0

        def on_step(step: int, total: int, latents: Any) -> None:
            nonlocal steps
            steps = step
            self._hear(steps)
            if all(item.item in self._aborted for item in run.items):
                # Not the pipeline's own `interrupt` flag: not all know it, and it would still decode the picture.
                raise _JobAborted
            self._wire.send(self._step(run, step, total, latents))

        try:
            self._loras.use(run.lora, run.lora_scale)
            made = call_pipeline(self._pipe, self._facts, run, on_step)
        except _JobAborted:
            return
        except AdapterError as error:
            self._end_all(run, steps, "invalid", str(error), "lora")
        except Exception as error:
            if len(run.items) > 1:
                # It may be one item's fault: the others must not suffer for it.
                for alone in items_alone(run):
                    if alone.items[0].item not in self._aborted:
                        self._run(alone)
            elif isinstance(error, InvalidCallError):
                self._end_all(run, steps, "invalid", str(error), error.field)
            else:
                print(f"a request failed: {type(error).__name__}: {error}", flush=True)
                self._end_all(run, steps, "failed", f"{type(error).__name__}: {error}")
        else:
            outputs = iter(made)
            for item in run.items:
                for index, seed in enumerate(item.seeds):
                    output = next(outputs)
                    if item.item not in self._aborted:
                        kind = "latent" if run.latents_out else self._facts.modality
                        arrays = {"output": output.array}
                        self._wire.send(Output(item.item, index, seed, kind, output.flagged, arrays))
            self._end_all(run, steps, "done")

    def _end_all(self, run: Run, steps: int, status: str, message: str = "", field: str = "") -> None:
        for item in run.items:
            if item.item not in self._aborted:
                self._wire.send(ItemEnded(item.item, status, steps, message, field))

    def _hear(self, steps: int) -> None:
        """Take what came since the last step."""
        while (message := self._wire.receive(0)) is not None:
            if isinstance(message, Abort):
                if message.item in self._job - self._aborted:
                    self._aborted.add(message.item)
                    self._wire.send(ItemEnded(message.item, "aborted", steps))
            elif isinstance(message, Call) and message.method == "ping":
                self._wire.send(self._answer(message))
            else:
                self._later.append(message)

    def _step(self, run: Run, step: int, total: int, latents: Any) -> Step:
        live = [item for item in run.items if item.item not in self._aborted]
        previews: dict[str, np.ndarray[Any, Any]] = {}
        for place, item in enumerate(run.items):
            due = item.preview_interval and step % item.preview_interval == 0 and step < total
            if due and item in live and latents is not None and self._previews_work:
                self._preview(run, item, latents[place * len(item.seeds)], previews)
        return Step(tuple(item.item for item in live), step, total, previews)

    def _preview(self, run: Run, item: Item, latents: Any, previews: dict[str, np.ndarray[Any, Any]]) -> None:
        from stagemesh_worker.engines.diffusion.generation import decode_preview

        height = run.call.get("height") or self._facts.native_height
        width = run.call.get("width") or self._facts.native_width
        try:
            previews[str(item.item)] = decode_preview(self._pipe, latents, height, width)
        except Exception as error:
            # A preview is an extra: the picture itself goes on.
            self._previews_work = False
            print(f"no previews from {self._facts.class_name}: {type(error).__name__}: {error}", flush=True)

    # -------------------------------------------------------------- control
    def _answer(self, call: Call) -> Result:
        from stagemesh_worker.engines.diffusion.adapters import AdapterError

        try:
            return Result(call.call, value=self._control(call.method, call.args))
        except AdapterError as error:
            return Result(call.call, error=str(error), refused=True)
        except Exception as error:
            return Result(call.call, error=f"{type(error).__name__}: {error}")

    def _control(self, method: str, args: Mapping[str, Any]) -> Any:
        if method == "ping":
            return True
        if method == "add_lora":
            self._loras.load(args["name"])
            return True
        if method == "remove_lora":
            return self._loras.unload(args["name"])
        if method == "list_loras":
            return self._loras.names()
        if method == "sleep":
            self._move("cpu")
            return True
        if method == "wake_up":
            self._move(args["device"])
            return True
        raise ValueError(f"no control method {method!r}")

    def _move(self, device: str) -> None:
        import torch

        if getattr(self._pipe, "_all_hooks", None):  # offloaded: its weights lie in host memory while it rests
            return
        self._pipe.to(device)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _load(config: Mapping[str, Any], wire: Wire) -> Worker:
    from stagemesh_worker.engines.diffusion.adapters import LoraAdapters
    from stagemesh_worker.engines.diffusion.pipeline import describe, load_pipeline

    options = DiffusionOptions(**config["options"])
    pipe = load_pipeline(config["model"], config["device"], options)
    loras = LoraAdapters(pipe, config["lora_modules"])
    if options.lora_path is not None:
        loras.load_always_on(options.lora_path, options.lora_scale)
    facts = describe(pipe)
    wire.send(Ready(asdict(facts)))
    return Worker(wire, pipe, facts, loras)


def _end_with(parent: int) -> None:
    """Never outlive the engine: by a signal from the kernel, and by the end of stdin where that signal is lost."""
    die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)

    def wait_for_end() -> None:
        while sys.stdin.buffer.read(1):
            pass
        os._exit(0)

    threading.Thread(target=wait_for_end, name="parent-watch", daemon=True).start()


def main() -> int:
    """Entry point."""
    config = json.loads(sys.stdin.buffer.readline())
    if config["cores"]:
        for thread in os.listdir("/proc/self/task"):  # importing NumPy may have made some
            os.sched_setaffinity(int(thread), config["cores"])
    _end_with(config["parent"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the engine's business
    wire = Wire(config["address"])
    started = time.monotonic()
    try:
        worker = _load(config, wire)
    except Exception as error:
        fatal = isinstance(error, EngineConfigError)
        message = str(error) if fatal else f"{type(error).__name__}: {error}"
        print(f"loading {config['model']} failed: {message}", flush=True)
        wire.send(Failed(message, fatal))
        wire.close()
        return EXIT_FAILED
    print(f"loaded {config['model']} in {time.monotonic() - started:.1f} s", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        worker.serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
