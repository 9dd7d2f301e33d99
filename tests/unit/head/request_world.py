"""A world for one request's state machine: replicas, links and a client, which check every order and act at random."""

from __future__ import annotations

from typing import Any

from stagemesh.config import Pipeline
from stagemesh.rpc.errors import MeshError, Reason
from stagemesh.v1 import frame_pb2 as frame_pb
from stagemesh.v1 import inference_pb2 as inference_pb
from stagemesh.v1 import prompt_pb2 as prompt_pb
from stagemesh.v1 import replica_pb2 as replica_pb
from stagemesh.v1 import sampling_pb2 as sampling_pb
from stagemesh_head.orchestration import events as ev
from stagemesh_head.orchestration.machine import RequestMachine
from stagemesh_head.orchestration.plan import Companion, Planner
from stagemesh_head.orchestration.task import TaskState

TOKENS = 150
"""Of every output: more than two windows of credit."""


def stage(
    name: str, *inputs: str, edge: str = "whole", output: bool = True, expand: str | None = None
) -> dict[str, Any]:
    return {
        "name": name, "engine": "synthetic", "inputs": inputs, "edge": edge, "final_output": output,
        "prompt_expand": expand,
    }  # fmt: skip


GRAPHS = {
    "one": [stage("a")],
    "chain": [stage("a"), stage("b", "a"), stage("c", "b")],
    "hidden": [stage("a", output=False), stage("b", "a")],
    "stream": [stage("a", output=False), stage("b", "a", edge="stream")],
    "streams": [stage("a", output=False), stage("b", "a", edge="stream", output=False), stage("c", "b", edge="stream")],
    "diamond": [stage("a"), stage("b", "a", edge="stream"), stage("c", "a"), stage("d", "b", "c")],
    "two readers": [stage("a", output=False), stage("b", "a", edge="stream"), stage("c", "a", edge="stream")],
    "companions": [stage("a", expand="x.y"), stage("b", "a")],
    "companions of a stream": [stage("a", expand="x.y"), stage("b", "a", edge="stream"), stage("c", "b", "a")],
}
COMPANIONS = ["-negative", "-other"]
SAMPLING = {
    "exact": {"temperature": 0.0},
    "continued": {"temperature": 1.0},
    "restarted": {"temperature": 0.0, "presence_penalty": 1.0},
}


def machine_of(graph: str, sampling: str, *, final_only: bool = False, exact_or_fail: bool = False) -> RequestMachine:
    stages = [{**row, "stage_id": number} for number, row in enumerate(GRAPHS[graph])]
    pipeline = Pipeline.model_validate({"name": "p", "stages": stages})
    request = inference_pb.GenerateRequest(request_id="r", prompt=prompt_pb.Prompt(text="x"))
    if final_only:
        request.output_mode = inference_pb.OUTPUT_MODE_FINAL_ONLY
    if exact_or_fail:
        request.recovery_policy = inference_pb.RECOVERY_POLICY_EXACT_OR_FAIL
    for row in stages:
        llm = sampling_pb.LlmSamplingParams(**SAMPLING[sampling])
        request.sampling.add(stage=row["name"], params=sampling_pb.SamplingParams(llm=llm))
    return RequestMachine(Planner(pipeline).plan(request), 0.0)


class World:
    """Replicas, links and a client, as far as a request sees them; it checks every order that the machine gives."""

    def __init__(self, machine: RequestMachine) -> None:
        self.machine = machine
        self.now = 0.0
        self.binding: set[str] = set()
        self.bound: set[str] = set()
        self.live: set[str] = set()
        self.aborting: set[str] = set()
        self.ends: list[ev.End] = []
        self.delivered: list[str] = []
        self.credit: dict[str, float] = {}
        self.inputs: dict[str, dict[str, list[int]]] = {}
        self.closed: dict[str, bool] = {}
        self.untaken: dict[str, int] = {}
        self.early: set[str] = set()
        self.attempts = 0
        self.expanding = False
        self.waiting_for_companions = False
        self.beside: dict[str, tuple[int, str, int] | None] = {}
        self.tell(ev.Start())

    def tell(self, event: ev.Event) -> None:
        self.now += 0.01
        for command in self.machine.handle(event, self.now):
            self.carry_out(command)

    def carry_out(self, command: ev.Command) -> None:
        name = getattr(command, "task", "")
        after_end = bool(self.ends)
        match command:
            case ev.Bind():
                assert not after_end
                assert name not in self.binding | self.bound | self.live
                assert not self.expanding
                self.binding.add(name)
                self.check_place(command)
                self.beside[name] = command.beside
            case ev.Expand():
                assert not after_end
                self.expanding = True
            case ev.AwaitCompanions():
                assert not self.waiting_for_companions
                self.waiting_for_companions = True
            case ev.CancelBind():
                self.binding.remove(name)
            case ev.Submit(_, submit):
                assert not after_end
                assert name in self.bound - self.live
                assert not self.expanding
                self.live.add(name)
                self.attempts += 1
                self.credit[name] = submit.credit or float("inf")
                self.inputs[name] = {i.stage + i.role: list(i.token_ids) for i in submit.inputs}
                self.closed[name] = not submit.more_input
                self.untaken[name] = 0
                if not submit.more_input:
                    assert all(i.finished for i in submit.inputs)
            case ev.Feed(_, append):
                assert not after_end
                assert name in self.live - self.aborting
                assert not self.closed[name]
                self.inputs[name].setdefault(append.chunk.stage, []).extend(append.chunk.token_ids)
                self.closed[name] = append.last
                self.untaken[name] += 1
            case ev.Grant(_, units):
                assert name in self.live - self.aborting
                assert units > 0
                self.credit[name] += units
            case ev.AbortTask():
                assert name in self.live - self.aborting
                self.aborting.add(name)
            case ev.Release():
                self.bound.remove(name)
                self.live.discard(name)
                self.aborting.discard(name)
            case ev.DeliverFinished():
                assert not after_end
                assert name not in self.delivered
                self.delivered.append(name)
            case ev.End():
                assert not after_end, "it ended twice"
                assert (command.finished is None) != (command.error is None) or self.client_left
                self.ends.append(command)

    def check_place(self, bind: ev.Bind) -> None:
        """A task goes to the replica of a sibling, unless it was lost on all of theirs."""
        task = self.machine.tasks[bind.task]
        siblings = [t for t in self.machine.tasks.values() if t.stage_name == task.stage_name and t is not task]
        places = [t.tried[-1] for t in siblings if t.is_bound and t.tried[-1] not in task.tried]
        assert bind.beside in (places or [None])
        assert not any(t.is_binding for t in siblings), "it must know where they are before it follows"

    @property
    def client_left(self) -> bool:
        stop = self.machine.stop
        return stop is not None and stop.cause is ev.StopCause.CLIENT_LEFT

    # -- what can happen ------------------------------------------------------
    def bind(self, name: str) -> None:
        self.binding.remove(name)
        self.bound.add(name)
        place = self.beside[name] or (0, "i", self.attempts)
        self.tell(ev.Bound(name, replica_pb.ReplicaRef(stage=name), place))

    def expand(self, *, fails: bool = False) -> None:
        self.expanding = False
        if fails:
            self.tell(ev.ExpandFailed(MeshError(Reason.ADAPTER_FAILED)))
            return
        params = self.machine.plan.stages[0].params
        made = [Companion(suffix, suffix[1:], prompt_pb.Prompt(text=suffix), params) for suffix in COMPANIONS]
        self.tell(ev.Expanded(made))

    def output(self, name: str, count: int) -> None:
        """Tokens are numbered, so that one that is lost or doubled shows."""
        have = self.machine.tasks[name].output.token_ids
        count = int(min(count, TOKENS - len(have), self.credit[name]))
        if count > 0:
            self.credit[name] -= count
            start = len(have)
            have.extend(range(start, start + count))
            self.machine.tasks[name].output.texts.append("x" * count)
            self.tell(ev.OutputArrived(name))

    def take(self, name: str) -> None:
        if self.untaken[name]:
            self.untaken[name] -= 1
            self.tell(ev.InputTaken(name, 1))

    def finish(self, name: str, *, early: bool = False) -> None:
        """A task finishes when it has made all its output, and with all its input unless it stops `early`."""
        if (self.closed[name] or early) and len(self.machine.tasks[name].output.token_ids) == TOKENS:
            self.live.discard(name)
            if not self.closed[name]:
                self.early.add(name)
            self.tell(ev.Finished(name, frame_pb.StageFinished(finish_reason=frame_pb.FINISH_REASON_LENGTH)))

    def random_step(self, choice: int) -> None:
        kind, rest = choice % 16, choice // 16
        if self.expanding and kind < 14:
            self.expand(fails=rest % 16 == 0)
            return
        if self.waiting_for_companions and kind < 8:
            self.waiting_for_companions = False
            self.tell(ev.CompanionsLate())
            return
        if kind == 0 and self.binding:
            self.bind(pick(self.binding, rest))
            return
        if kind == 15:
            cause = [ev.StopCause.ASKED, ev.StopCause.CLIENT_LEFT, ev.StopCause.FAILED, None][rest % 4]
            error = MeshError(Reason.REQUEST_TIMEOUT) if cause is ev.StopCause.FAILED else None
            self.tell(ev.Stop(cause, error) if cause is not None else ev.StopTimeout())
            return
        if kind == 14 and self.binding:
            name = pick(self.binding, rest)
            self.binding.remove(name)
            self.tell(ev.BindFailed(name, MeshError(Reason.OVERLOADED)))
            return
        if kind == 13:
            # Something that comes too late, or never should.
            name = pick(self.machine.tasks, rest)
            if name not in self.live:
                late = [ev.Lost(name, MeshError(Reason.REPLICA_LOST)), ev.Aborted(name), ev.OutputArrived(name)]
                self.tell(late[rest % 3])
            return
        if not self.live:
            if self.binding:
                self.bind(pick(self.binding, rest))
            return
        name = pick(self.live, rest)
        if name in self.aborting:
            self.confirm(name, rest)
        elif kind <= 4:
            self.output(name, 1 + rest % 40)
        elif kind <= 6:
            self.take(name)
        elif kind <= 9:
            self.finish(name, early=rest % 4 == 0)
        elif kind == 10:
            self.tell(ev.Started(name, 0.0, 0.0))
        elif kind == 11:
            self.live.discard(name)
            self.tell(ev.Lost(name, MeshError(Reason.REPLICA_LOST)))
        elif kind == 12:
            self.live.discard(name)
            reason = Reason.STAGE_FAILED if rest % 8 == 0 else Reason.ENGINE_DEAD
            self.tell(ev.Failed(name, MeshError(reason)))

    def confirm(self, name: str, how: int) -> None:
        """An abort is confirmed, or crosses the task's own end, or the replica is lost."""
        self.live.discard(name)
        error = MeshError(Reason.REPLICA_LOST)
        ends = [ev.Aborted(name), ev.Lost(name, error), ev.Failed(name, MeshError(Reason.STAGE_FAILED))]
        self.tell(ends[how % 3])

    def settle(self) -> None:
        """From now on all goes well: everything must come to its end in a bounded number of steps."""
        for _ in range(2_000):
            if self.machine.is_quiet:
                return
            if self.expanding:
                self.expand()
            for name in sorted(self.binding):
                if name in self.binding:
                    self.bind(name)
            for name in sorted(self.live):
                if name not in self.live:
                    continue
                if name in self.aborting:
                    self.confirm(name, 0)
                    continue
                self.tell(ev.Started(name, 0.0, 0.0))
                for _ in range(self.untaken.get(name, 0)):
                    self.take(name)
                if name in self.live - self.aborting:
                    self.output(name, 50)
                if name in self.live - self.aborting:
                    self.finish(name)
        raise AssertionError(f"it hangs: binding {self.binding}, bound {self.bound}, live {self.live}")


def pick(names: Any, number: int) -> str:
    ordered = sorted(names)
    return ordered[number % len(ordered)]


def check_end(world: World) -> None:
    """What holds for every request, however it went."""
    assert len(world.ends) == 1
    assert not (world.binding or world.bound or world.live)
    assert world.machine.unconfirmed == []
    end = world.ends[0]
    if end.finished is not None and end.finished.finish_reason == frame_pb.FINISH_REASON_COMPLETE:
        tasks = world.machine.tasks
        outputs = [task for task in tasks.values() if task.planned.is_output]
        if world.machine.plan.companion_readers:
            made = [task for task in tasks.values() if task.companion is not None]
            assert [task.companion.suffix for task in made if task.companion] == COMPANIONS
            assert {task.state for task in made} == {TaskState.DONE}
            for reader in world.machine.plan.companion_readers:
                assert {"anegative", "aother"} < set(world.inputs[reader])
                assert all(given == list(range(TOKENS)) for given in world.inputs[reader].values())
        assert sorted(world.delivered) == sorted(task.name for task in outputs)
        for task in outputs:
            assert task.output.token_ids == list(range(TOKENS)), "a token was lost or doubled"
            assert task.output.text == "x" * TOKENS
        for task in tasks.values():
            if task.state is TaskState.DONE and task.planned.reads_stream and task.name not in world.early:
                for name, given in world.inputs[task.name].items():
                    # A consumer that is done had its whole input, once and in order.
                    assert given == list(range(TOKENS)), name
