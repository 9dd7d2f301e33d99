"""`python -m stagemesh_worker.replica --control-fd N`: one replica process, spawned by a node agent.

The order matters: environment and cores first, then the engine's `prepare` (vLLM forks its core), and only then an
event loop and gRPC, since a fork after gRPC has threads dead-locks.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys

from stagemesh.config import Stage
from stagemesh.launch.parentage import die_with_parent
from stagemesh.telemetry.logs import set_up_child_logging
from stagemesh_worker.engines.base import DeviceSet, Engine, EngineConfigError
from stagemesh_worker.engines.registry import engine_class
from stagemesh_worker.replica import environment
from stagemesh_worker.replica.channel import ControlChannel
from stagemesh_worker.replica.control import EXIT_FAILED, Assign, ControlError, Failed, Phase
from stagemesh_worker.rundir import remove_run_directory

log = logging.getLogger("stagemesh.replica")


def main() -> int:
    """Run one replica; returns the exit code: 0 after an order to stop, 3 after a failure it has reported."""
    parser = argparse.ArgumentParser(prog="python -m stagemesh_worker.replica")
    parser.add_argument("--control-fd", type=int, required=True, help="inherited end of the agent's socket pair")
    arguments = parser.parse_args()
    # SIGTERM, so that sockets and shared memory are cleaned up when the agent is killed.
    die_with_parent(signal.SIGTERM)
    set_up_child_logging("replica")
    os.set_inheritable(arguments.control_fd, False)
    channel = ControlChannel(socket.socket(fileno=arguments.control_fd))
    try:
        assign = channel.read_assignment()
    except (ControlError, EOFError, OSError) as error:
        log.error("control socket: %s", error)
        return 2
    set_up_child_logging("replica", stage=assign.stage.get("name"), replica=assign.replica_id)
    try:
        engine = _prepare(assign, channel)
    except EngineConfigError as error:
        return _refuse(channel, _bad_config(assign, error))
    except Exception as error:
        log.exception("the engine could not be prepared")
        return _refuse(channel, Failed("START_FAILED", f"{type(error).__name__}: {error}"))
    return _serve(assign, engine, channel)


def _bad_config(assign: Assign, error: EngineConfigError) -> Failed:
    """The engine's refusal, with the stage that it is about: no restart would help."""
    return Failed("BAD_STAGE_CONFIG", f"stage {assign.stage.get('name')!r}: {error}", fatal=True)


def _prepare(assign: Assign, channel: ControlChannel) -> Engine:
    """Everything that must be done before a thread, an event loop or a gRPC object exists."""
    stage = Stage.model_validate(assign.stage)
    environment.set_title(f"stagemesh: {stage.name}/{assign.replica_id} ({assign.pipeline})")
    devices = DeviceSet(
        tuple(device.id for device in assign.devices),
        tuple(core for device in assign.devices for core in device.cores),
        tuple(device.physical_id for device in assign.devices if device.physical_id),
    )
    environment.apply_devices(devices)
    environment.apply_settings(stage.runtime.env, stage.model)
    channel.send(Phase(f"importing engine {stage.engine}"))
    found = engine_class(stage.engine)
    found.check(stage)
    engine = found(stage, devices)
    engine.replica_id = assign.replica_id
    engine.report_phase = lambda phase: channel.send(Phase(phase))
    engine.host = assign.advertise_host
    engine.prepare()
    return engine


def _serve(assign: Assign, engine: Engine, channel: ControlChannel) -> int:
    """Live on an event loop; does not return but after a refusal."""
    import asyncio

    import uvloop

    from stagemesh_worker.adapters import AdapterRunner
    from stagemesh_worker.replica.host import ReplicaHost

    try:
        adapters = AdapterRunner(engine.stage, assign.adapter_timeout_s)
    except EngineConfigError as error:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(engine.stop())
        return _refuse(channel, _bad_config(assign, error))

    async def live() -> int:
        failure = await ReplicaHost(assign, engine, adapters, channel).run()
        return 0 if failure is None else EXIT_FAILED

    runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    code = runner.run(live())
    # What matters is cleaned up; libraries' threads and seconds of their finalizers are not waited for.
    remove_run_directory()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _refuse(channel: ControlChannel, failed: Failed) -> int:
    log.error("%s", failed.message)
    channel.send(failed)
    return EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
