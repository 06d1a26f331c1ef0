"""Discrete-event simulation of a schedule: exclusive compute, links with occupancy, receives that must be posted.

One actor per group when all ranks of a group do the same (its NICs added up), or one per rank. A message travels when it is
sent AND its receive is posted, first in, first out on its communicator, sharing both NICs with others max-min fairly.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from torchmoe.errors import ConfigError, ScheduleError
from torchmoe.pipeline.action import COMPUTE, MESSAGE, Action, Op, Schedule
from torchmoe.pipeline.costs import Costs, per_stage
from torchmoe.pipeline.network import Host, Links, Network
from torchmoe.pipeline.trace import Event
from torchmoe.pipeline.wiring import SENDS, End, Wiring, default_wiring, explicit_waits
from torchmoe.placement import Placement, Residual

__all__ = ["Simulation", "simulate"]

_RECVS = (Op.RECV_F, Op.RECV_B)
_Name = tuple[str, int, int, int, int]  # kind, layer, micro-batch, source and target actor
_FORWARD = (Op.FORWARD, Op.SEND_F, Op.RECV_F, Op.WAIT_F)


@dataclass(frozen=True)
class Simulation:
    """What a simulated step did. Keys are groups, or ranks as text (``A0[1]``) when simulated per rank.

    Args:
        makespan: seconds of the step, from its start to the last computation's end.
        busy: seconds of computation.
        first, last: start of the first and end of the last computation.
        blocked: seconds in which a computation had to wait for a message.
        peak_memory: most bytes per rank of live units, held weight gradients and message buffers.
        carried: seconds that each actor's NIC needs for what it sends and for what it receives.
        events: one record per computation, blocking wait and message (empty without ``record``).
    """

    makespan: float
    busy: dict[str, float]
    first: dict[str, float]
    last: dict[str, float]
    blocked: dict[str, float]
    peak_memory: dict[str, float]
    carried: dict[str, tuple[float, float]]
    events: list[Event] = field(repr=False, default_factory=list)

    @property
    def bubble_makespan(self) -> float:
        """Makespan minus the busiest actor's work: what a synchronous optimizer pays."""
        return self.makespan - max(self.busy.values())

    @property
    def bubble_span(self) -> float:
        """Most idle time between an actor's own first and last computation: the definition of the zero-bubble papers."""
        return max(self.last[k] - self.first[k] - self.busy[k] for k in self.busy)

    @property
    def exposed(self) -> float:
        """Share of the step that is not computation on the busiest actor: bubbles and communication that nothing hid."""
        return self.bubble_makespan / self.makespan if self.makespan else 0.0

    @property
    def bound(self) -> float:
        """No order of these actions is faster: the busiest computation or NIC direction."""
        return max([*self.busy.values(), *(x for pair in self.carried.values() for x in pair)])


def simulate(
    schedule: Schedule,
    costs: Costs,
    where: Wiring | Placement | None = None,
    *,
    residual: Residual | None = None,
    links: Links | None = None,
    host: Host | None = None,
    per_rank: bool = False,
    issue: Literal["inline", "ahead"] = "inline",
    contention: float | None = None,
    memory_limit: float | None = None,
    record: bool = True,
) -> Simulation:
    """Run a schedule in simulated time.

    Args:
        schedule: compute-only (lowered first) or lowered.
        costs: of computations and messages.
        where: placement, wiring, or None for a plain pipeline.
        residual: with a placement, how the residual travels.
        links: default free and instant.
        host: the cores that all ranks share; default: issuing costs nothing.
        per_rank: one actor per rank (for ``costs.ranks``); 64 ranks take seconds, uneven ones half a minute.
        issue: "inline": the issuing thread computes itself (CPU), so a receive is posted when the computations before it are
            done. "ahead": computations and the sends behind them queue on a device, waits alone stop the issuing thread (CUDA).
        contention: None computes one thing at a time. A factor gives every actor a forward and a backward stream (with
            issue="ahead"), each that much slower while both compute: 1 is free overlap, 2 gains nothing.
        memory_limit: bytes per rank; a schedule whose live units need more is refused.
        record: keep events.

    Raises:
        ConfigError: costs or a contention that make no sense, more live units than the memory limit allows.
        ScheduleError: the schedule deadlocks (verify() says why).
    """
    wiring = default_wiring(schedule, where, residual=residual)
    lowered = explicit_waits(schedule, wiring) if schedule.lowered else wiring.lower(schedule)
    if contention is not None and not 1 <= contention <= 2:
        raise ConfigError(f"contention={contention} must be from 1 (free overlap) to 2 (no gain)")
    if issue not in ("inline", "ahead") or (contention is not None and issue != "ahead"):
        raise ConfigError(f"issue={issue!r} must be 'inline' or 'ahead', and two streams (contention=) need 'ahead'")
    if costs.ranks and not per_rank:
        raise ConfigError(f"ranks={dict(costs.ranks)} differ inside a group; simulate with per_rank=True")
    run = _Run(lowered, costs, wiring, links or Links(), host, per_rank, issue, contention, record)
    if memory_limit is not None:
        run.check_memory(memory_limit)
    return run.go()


class _Step:
    """A template: all actions that differ in the micro-batch only."""

    __slots__ = ("action", "by_host", "end", "kind", "stream")

    def __init__(self, action: Action, end: End | None) -> None:
        self.action, self.end = action, end
        op = action.op
        self.kind: Literal["compute", "send", "recv", "wait"] = (
            "compute" if end is None else "send" if op in SENDS else "recv" if op in _RECVS else "wait"
        )
        self.stream = 0 if op in _FORWARD else 1
        self.by_host = self.kind in ("recv", "wait")  # with issue="ahead": done by the issuing thread itself


class _Thread:
    """Something that runs steps in order: the whole actor, or its issuing thread and its two streams."""

    __slots__ = ("actor", "blocked_since", "name", "position", "steps")

    def __init__(self, actor: _Actor, name: str, steps: list[tuple[_Step, int, Action]]) -> None:
        self.actor, self.name, self.steps = actor, name, steps
        self.position = 0
        self.blocked_since: float | None = None


class _Message:
    """From one actor to another."""

    __slots__ = ("num_bytes", "posted", "sent", "sent_as")

    def __init__(self) -> None:
        self.posted: float | None = None
        self.sent: float | None = None
        self.sent_as: Action | None = None
        self.num_bytes = 0.0


class _Actor:
    def __init__(self, index: int, name: str, group: str, rank: int, share: int) -> None:
        self.index, self.name, self.group, self.rank, self.share = index, name, group, rank, share
        self.threads: list[_Thread] = []
        self.busy = 0.0
        self.first, self.last = math.inf, 0.0
        self.blocked = 0.0
        self.missing: dict[tuple[str, int, int], int] = {}  # (kind, layer, micro-batch) -> messages not yet here
        self.waiters: dict[tuple[str, int, int], _Thread] = {}
        self.computed: set[tuple[int, Op, int]] = set()
        self.sleepers: dict[tuple[int, Op, int], _Thread] = {}
        self.running: dict[_Thread, tuple[float, float]] = {}  # rest of the work, when that was true
        self.plan = 0  # number of the last plan of ends
        self.memory = self.peak = 0.0
        self.sent_seconds = self.received_seconds = 0.0

    def hold(self, num_bytes: float) -> None:
        self.memory += num_bytes / self.share
        self.peak = max(self.peak, self.memory)


class _Run:
    def __init__(
        self,
        schedule: Schedule,
        costs: Costs,
        wiring: Wiring,
        links: Links,
        host: Host | None,
        per_rank: bool,
        issue: str,
        contention: float | None,
        record: bool,
    ) -> None:
        self.schedule, self.costs, self.wiring, self.links = schedule, costs, wiring, links
        self.per_rank, self.issue, self.contention, self.record = per_rank, issue, contention, record
        self.host, self.host_free = host, 0.0
        self.now = 0.0
        self.events: list[Event] = []
        self.timers: list[tuple[float, int, Callable[[], None]]] = []
        self.count = 0
        self.messages: dict[_Name, _Message] = {}
        self.ready: deque[_Thread] = deque()
        self.actors: list[_Actor] = []
        self.members: dict[str, list[_Actor]] = {}
        egress: list[float] = []
        burst: list[float] = []
        rank = 0
        for group in wiring.groups:
            size = wiring.size(group)
            total = links.bandwidth * links.nics.get(group, size)
            names = [f"{group}[{i}]" for i in range(size)] if per_rank else [group]
            members = [_Actor(len(self.actors) + i, name, group, rank + i, size // len(names)) for i, name in enumerate(names)]
            factors = costs.ranks.get(group)
            if factors is not None and len(factors) != size:
                raise ConfigError(f"ranks[{group!r}] has {len(factors)} factors for {size} ranks; give one per rank")
            self.members[group] = members
            self.actors += members
            egress += [total / len(names)] * len(names)
            burst += [links.burst * links.nics.get(group, size) / len(names)] * len(names)
            rank += size
        self.network: Network[_Name] = Network(egress, list(egress), burst)
        for group, acts in schedule.lists.items():
            self._compile(group, acts)

    # ---- set-up
    def _compile(self, group: str, acts: tuple[Action, ...]) -> None:
        if group not in self.members:
            raise ScheduleError(f"the schedule has a list for {group}, the layout has {', '.join(self.members)}")
        templates: dict[tuple[int, Op, str | None], _Step] = {}
        steps: list[tuple[_Step, int, Action]] = []
        for a in acts:
            if a.op not in COMPUTE and a.op not in MESSAGE and not a.sub:
                continue  # sharding actions cost nothing here
            key = (a.stage, a.op, a.edge)
            step = templates.get(key) if not a.sub else None
            if step is None:
                step = _Step(a, self.wiring.end(a) if a.op in MESSAGE else None)
                if not a.sub:
                    templates[key] = step
            steps.append((step, a.microbatch or 0, a))
        for actor in self.members[group]:
            actor.threads = [_Thread(actor, "compute", steps if self.issue == "inline" else [])]
            if self.issue == "ahead":
                actor.threads.insert(0, _Thread(actor, "issue", steps))
            if self.contention is not None:
                actor.threads.append(_Thread(actor, "backward", []))

    def _ends(self, actor: _Actor, end: End) -> list[tuple[_Actor, float]]:
        """The actors at the other end, with their part of the group's message that is this actor's."""
        peers = self.members[end.peer]
        if not self.per_rank:
            return [(peers[0], 1.0)]
        mine = self.members[actor.group]
        i = mine.index(actor)
        if peers is mine:
            return [(q, 1 / (len(mine) * (len(mine) - 1))) for q in mine if q is not actor]
        if end.kind in ("ids", "labels", "residual", "d_residual", "act", "d_act", "grad"):
            return self._overlaps(i, len(mine), peers)
        ways = [self._shares(g) for g in (mine, peers)]
        return [(q, ways[0][i] * ways[1][j]) for j, q in enumerate(peers)]

    def _shares(self, members: list[_Actor]) -> list[float]:
        factors = self.costs.ranks.get(members[0].group)
        if factors is None or not sum(factors):
            return [1 / len(members)] * len(members)
        return [f / sum(factors) for f in factors]

    def _overlaps(self, i: int, n: int, peers: list[_Actor]) -> list[tuple[_Actor, float]]:
        """Both groups hold the same sequences in order, each rank an equal part."""
        out = []
        for j, q in enumerate(peers):
            part = min((i + 1) / n, (j + 1) / len(peers)) - max(i / n, j / len(peers))
            if part > 1e-12:
                out.append((q, part))
        return out

    def check_memory(self, limit: float) -> None:
        for group, acts in self.schedule.lists.items():
            live = peak = 0.0
            for a in (p for x in acts for p in x.parts):
                size = per_stage("activation", self.costs.activation, a.stage) * self.costs.factor(a.microbatch)
                size /= 1 if a.edge is None else self.costs.parts
                live += size * ((a.op is Op.FORWARD) - (a.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT)))
                peak = max(peak, live)
            if peak > limit:
                raise ConfigError(
                    f"{group} holds {peak:.4g} bytes of live units, a rank has {limit:.4g}; "
                    "use a shorter cycle, more groups, smaller micro-batches or recomputation"
                )

    # ---- the clock
    def go(self) -> Simulation:
        self.ready.extend(t for a in self.actors for t in a.threads[:1])
        while True:
            while self.ready:
                self._advance(self.ready.popleft())
            at = min(self.timers[0][0] if self.timers else math.inf, self.network.next_end())
            if at == math.inf:
                break
            self.now = at
            if self.network.next_end() <= at:
                for key in self.network.finish(at):
                    self._left(key)
            while self.timers and self.timers[0][0] <= at:
                heapq.heappop(self.timers)[2]()
        for a in self.actors:
            for t in a.threads:
                if t.position < len(t.steps):
                    raise ScheduleError(f"deadlock: {a.name} never gets past {t.steps[t.position][2]}; verify() prints the cycle")
        return Simulation(
            max((a.last for a in self.actors), default=0.0),
            {a.name: a.busy for a in self.actors},
            {a.name: min(a.first, a.last) for a in self.actors},
            {a.name: a.last for a in self.actors},
            {a.name: a.blocked for a in self.actors},
            {a.name: a.peak for a in self.actors},
            {a.name: (a.sent_seconds, a.received_seconds) for a in self.actors},
            self.events,
        )

    def _timer(self, delay: float, call: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.timers, (self.now + delay, self.count, call))

    # ---- steps
    def _advance(self, thread: _Thread) -> None:
        actor = thread.actor
        issuing = thread.name == "issue"
        while thread.position < len(thread.steps):
            step, m, action = thread.steps[thread.position]
            if issuing and not step.by_host:
                if step.kind == "compute" and (pause := self._issued(actor, action)):
                    self._timer(pause, partial(self._hand_over, thread))
                    return
                self._queue(thread)
                continue
            if step.kind == "compute":
                if self._sleeps(thread, action):
                    return
                self._start(thread, action)
                return
            assert step.end is not None
            key = (step.end.kind, step.end.layer, m)
            if step.kind == "wait":
                if actor.missing.get(key, 1):
                    actor.waiters[key] = thread
                    thread.blocked_since = self.now
                    return
                if pause := self._served(actor, step.end):
                    self._timer(pause, partial(self._resume, thread))
                    return
            elif step.kind == "send" and (pause := self._served(actor, step.end)):
                # another thread of the rank starts it meanwhile
                self._timer(pause, partial(self._send_later, actor, step.end, key, action))
            else:
                pause = self._post(actor, step.end, key, action, sending=step.kind == "send")
                if pause:
                    self._timer(pause, partial(self._resume, thread))
                    return
            thread.position += 1

    def _queue(self, thread: _Thread) -> None:
        """The issuing thread leaves its step to the device."""
        actor = thread.actor
        step, m, action = thread.steps[thread.position]
        stream = actor.threads[min(1 + step.stream, len(actor.threads) - 1)]
        stream.steps.append((step, m, action))
        if stream.position == len(stream.steps) - 1:
            self.ready.append(stream)
        thread.position += 1

    def _hand_over(self, thread: _Thread) -> None:
        self._queue(thread)
        self.ready.append(thread)

    def _issued(self, actor: _Actor, action: Action) -> float:
        """Seconds until the host has issued a computation; weight gradients are part of their unit."""
        if self.host is None or action.op is Op.BACKWARD_WEIGHT:
            return 0.0
        return self._work(self.host.unit * actor.share * len(action.parts))

    def _work(self, seconds: float) -> float:
        """Queue for the cores; how long it takes until it is done."""
        assert self.host is not None
        self.host_free = max(self.host_free, self.now) + seconds / self.host.cores
        return self.host_free - self.now

    def _served(self, actor: _Actor, end: End) -> float:
        """Seconds until the host has issued one end of a message, on all ranks of the actor."""
        if self.host is None:
            return 0.0
        share = actor.share / self.wiring.size(actor.group)
        return self._work(self.host.message * share * self.wiring.pairs(end, actor.group))

    def _sleeps(self, thread: _Thread, action: Action) -> bool:
        """With two streams a computation may need one of the other stream."""
        if self.contention is None or action.op is Op.FORWARD or action.sub:
            return False
        need = (action.stage, Op.BACKWARD_INPUT if action.op is Op.BACKWARD_WEIGHT else Op.FORWARD, action.microbatch or 0)
        if need in thread.actor.computed:
            return False
        thread.actor.sleepers[need] = thread
        return True

    def _resume(self, thread: _Thread) -> None:
        thread.position += 1
        self.ready.append(thread)

    def _start(self, thread: _Thread, action: Action) -> None:
        actor = thread.actor
        if thread in actor.running:
            return
        factors = self.costs.ranks.get(actor.group) if self.per_rank else None
        seconds = self.costs.seconds(action) * (factors[self.members[actor.group].index(actor)] if factors else 1.0)
        actor.first = min(actor.first, self.now)
        for part in action.parts:
            if part.op is Op.FORWARD:
                actor.hold(self._bytes("activation", self.costs.activation, part) * actor.share)
            if part.op is Op.BACKWARD_INPUT:
                actor.hold(self._bytes("held", self.costs.held, part) * actor.share)
        actor.busy += seconds
        thread.blocked_since = self.now  # the start, for the event
        self._share(actor)
        actor.running[thread] = (seconds, self.now)
        self._plan(actor)

    def _share(self, actor: _Actor) -> None:
        """Count the work done since the last change."""
        speed = self._speed(actor)
        for t, (rest, since) in actor.running.items():
            actor.running[t] = (rest - (self.now - since) * speed, self.now)

    def _speed(self, actor: _Actor) -> float:
        return 1 / self.contention if self.contention and len(actor.running) > 1 else 1.0

    def _plan(self, actor: _Actor) -> None:
        speed = self._speed(actor)
        actor.plan += 1
        for t, (rest, _) in actor.running.items():
            self._timer(max(0.0, rest) / speed, partial(self._computed, t, actor.plan))

    def _computed(self, thread: _Thread, plan: int) -> None:
        actor = thread.actor
        if plan != actor.plan:
            return  # the speed may have changed since this was planned
        self._share(actor)
        del actor.running[thread]
        _, _, action = thread.steps[thread.position]
        actor.last = self.now
        if self.record:
            start = self.now if thread.blocked_since is None else thread.blocked_since
            self.events.append(Event(actor.rank, actor.group, thread.name, str(action), "compute", start, self.now))
        thread.blocked_since = None
        for part in action.parts:
            if part.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT):
                actor.hold(-self._bytes("activation", self.costs.activation, part) * actor.share)
            if part.op is Op.BACKWARD_WEIGHT:
                actor.hold(-self._bytes("held", self.costs.held, part) * actor.share)
            done = (part.stage, part.op, part.microbatch or 0)
            actor.computed.add(done)
            if done in actor.sleepers:
                self.ready.append(actor.sleepers.pop(done))
        thread.position += 1
        self._plan(actor)
        self.ready.append(thread)

    def _bytes(self, name: str, value: object, action: Action) -> float:
        parts = 1 if action.edge is None else self.costs.parts
        return per_stage(name, value, action.stage) * self.costs.factor(action.microbatch) / parts  # type: ignore[arg-type]

    # ---- messages
    def _post(self, actor: _Actor, end: End, key: tuple[str, int, int], action: Action, *, sending: bool) -> float:
        ends = self._ends(actor, end)
        if not sending:
            actor.missing[key] = len(ends)
        size = self.costs.num_bytes(end.kind, action.microbatch)
        for peer, part in ends:
            pair = (actor.index, peer.index) if sending else (peer.index, actor.index)
            name = (*key, *pair)
            message = self.messages.get(name)
            if message is None:
                message = self.messages[name] = _Message()
            if sending:
                message.sent, message.sent_as = self.now, action
            else:
                message.posted = self.now
            message.num_bytes = size * part
            actor.hold(message.num_bytes)
            if message.sent is not None and message.posted is not None:
                early = message.posted + self.links.handshake - self.now
                if early > 0:
                    self._timer(early, partial(self._travel, end.communicator, name))
                else:
                    self._travel(end.communicator, name)
        return self.links.send_overhead * len(ends) if sending else 0.0

    def _send_later(self, actor: _Actor, end: End, key: tuple[str, int, int], action: Action) -> None:
        self._post(actor, end, key, action, sending=True)

    def _travel(self, communicator: str, name: _Name) -> None:
        pair, num_bytes = (name[3], name[4]), self.messages[name].num_bytes
        if not self.network.start(self.now, (communicator, *pair), pair, name, num_bytes):
            self._left(name)

    def _left(self, name: _Name) -> None:
        latency = self.links.between(self.actors[name[3]].group, self.actors[name[4]].group)
        if self.links.host_latency is not None and name[0] in ("counts", "ids", "labels"):
            latency = self.links.host_latency
        if latency:
            self._timer(latency, partial(self._arrived, name))
        else:
            self._arrived(name)

    def _arrived(self, name: _Name) -> None:
        message = self.messages.pop(name)
        source, target = self.actors[name[3]], self.actors[name[4]]
        source.hold(-message.num_bytes)
        for actor, side in ((source, "sent"), (target, "received")):
            capacity = self.network.egress[actor.index]
            seconds = message.num_bytes / capacity if capacity < math.inf else 0.0
            setattr(actor, f"{side}_seconds", getattr(actor, f"{side}_seconds") + seconds)
        if self.record:
            text, size = str(message.sent_as), round(message.num_bytes)
            sent, posted = message.sent or 0.0, message.posted or 0.0
            self.events.append(Event(source.rank, source.group, "send", text, "send", sent, self.now, target.rank, size))
            self.events.append(
                Event(target.rank, target.group, "recv", text, "recv", max(sent, posted), self.now, source.rank, size)
            )
        key = name[:3]
        target.hold(-message.num_bytes)
        target.missing[key] -= 1
        if target.missing[key] == 0 and (thread := target.waiters.pop(key, None)) is not None:
            since = thread.blocked_since if thread.blocked_since is not None else self.now
            target.blocked += self.now - since
            if self.record and self.now > since:
                action = thread.steps[thread.position][2]
                stream = "compute" if thread.name == "issue" else thread.name
                self.events.append(Event(target.rank, target.group, stream, str(action), "wait", since, self.now))
            thread.blocked_since = None
            self.ready.append(thread)
