"""Proof that a schedule runs: complete, causal, in order on every edge, and free of deadlock in the strictest transport.

The check executes the lists once, group by group, with rendezvous messages: a send ends only when its receive is posted, and per
(group, communicator) an operation starts only when all earlier ones have ended. Every slacker transport only removes waits, and
all of them match messages first in, first out, so what passes here runs there. Groups stand for their ranks: inside a group all
ranks run one list, and a message between groups is at least as strict as its messages between ranks.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from torchmoe.errors import ScheduleError
from torchmoe.pipeline.action import COMPUTE, MESSAGE, Action, Op, Schedule
from torchmoe.pipeline.wiring import SENDS, End, Wiring, default_wiring, explicit_waits
from torchmoe.placement import Placement, Residual

__all__ = ["Report", "verify"]

_RECVS = frozenset({Op.RECV_F, Op.RECV_B})
_WAITS = frozenset({Op.WAIT_F, Op.WAIT_B})
_POSTS = SENDS | _RECVS
_PARTNERS = {Op.RECV_F: Op.WAIT_F, Op.RECV_B: Op.WAIT_B, Op.WAIT_F: Op.RECV_F, Op.WAIT_B: Op.RECV_B}


@dataclass(frozen=True)
class Report:
    """Numbers of a schedule that passed.

    Args:
        peak_live: most live units per group, from the forward to the full backward or the weight gradient.
        peak_held: most units per group whose weight gradient is still to run after their input gradient.
        messages: messages between ranks of one replica by kind, at most (empty payloads are not sent), without self-copies.
        actions: actions of the lowered lists.
    """

    peak_live: dict[str, int]
    peak_held: dict[str, int]
    messages: dict[str, int]
    actions: int

    def __str__(self) -> str:
        live = ", ".join(f"{g} {n}" for g, n in self.peak_live.items())
        return f"{self.actions} actions, {sum(self.messages.values())} messages, peak live units {live}"


def verify(
    schedule: Schedule,
    where: Wiring | Placement | None = None,
    *,
    residual: Residual | None = None,
    max_live: int | None = None,
) -> Report:
    """Accept a schedule, or say what is wrong with it.

    Args:
        schedule: compute-only (it is lowered first) or lowered.
        where: a placement (A and F groups), a wiring, or None for a plain pipeline read off the lists.
        residual: with a placement, how the residual travels.
        max_live: live units per group that memory allows.

    Raises:
        ScheduleError: an action missing, twice, on the wrong group or too early; a message that meets another one; a deadlock
            (the cycle is in the text); more live units than allowed.
    """
    wiring = default_wiring(schedule, where, residual=residual)
    if set(schedule.lists) != set(wiring.groups):
        raise ScheduleError(
            f"the schedule has lists for {', '.join(schedule.lists)}, the layout has {', '.join(wiring.groups)}; "
            "give one list per group"
        )
    lowered = explicit_waits(schedule, wiring) if schedule.lowered else wiring.lower(schedule)
    scans = {g: _Scan(g, acts, wiring, lowered.num_microbatches) for g, acts in lowered.lists.items()}
    _check_complete(lowered, wiring, scans)
    for g, scan in scans.items():
        if max_live is not None and scan.peak_live > max_live:
            raise ScheduleError(
                f"{g} has {scan.peak_live} live units, memory allows {max_live}; "
                "use a shorter cycle, more groups or recomputation"
            )
    _Rendezvous(scans).run()
    messages: Counter[str] = Counter()
    for g, scan in scans.items():
        for t in scan.templates.values():
            if t.end is not None and t.end.sending:
                messages[t.end.kind] += wiring.pairs(t.end, g) * t.state.count(_DONE)
    return Report(
        {g: s.peak_live for g, s in scans.items()},
        {g: s.peak_held for g, s in scans.items()},
        dict(messages),
        sum(map(len, lowered.lists.values())),
    )


_Channel = tuple["deque[_Operation]", "deque[_Operation]"]
"""Sends and receives that have not met yet, in their order."""


@dataclass(slots=True)
class _Template:
    """All actions that differ in the micro-batch only. ``state`` has one byte of bits per micro-batch."""

    action: Action
    state: bytearray
    before: list[_Template] = field(default_factory=list)
    after: list[_Template] = field(default_factory=list)
    end: End | None = None
    partner: _Template | None = None  # a wait's receive and back; the other of B and I
    operations: list[_Operation | None] = field(default_factory=list)
    queue: deque[_Operation] | None = None
    channel: _Channel | None = None  # None for paired halves, which have one per micro-batch

    def at(self, microbatch: int | None) -> Action:
        return self.action._replace(microbatch=microbatch)


_OPEN, _DONE, _GIVEN = 1, 2, 4  # a receive is posted | it happened | the gradient exists by an input gradient


@dataclass(slots=True)
class _Operation:
    """A posted send or receive. It is active once all earlier ones of its queue are done, or at once if unordered."""

    scan: _Scan
    template: _Template
    microbatch: int
    channel: _Channel
    active: bool = False
    done: bool = False

    def __str__(self) -> str:
        return str(self.template.at(self.microbatch))


class _Scan:
    """One group's list: checked on its own, then reduced to its messages."""

    def __init__(self, group: str, actions: tuple[Action, ...], wiring: Wiring, num_microbatches: int) -> None:
        self.group, self.wiring, self.n = group, wiring, num_microbatches
        self.templates: dict[tuple[int, Op, str | None], _Template] = {}
        self._unnamed: dict[tuple[int, Op, str | None], _Template] = {}  # messages of torch's tables, which leave the edge out
        self.steps: list[tuple[_Template, int]] = []
        self.peak_live = self.peak_held = 0
        self.position = 0  # of the rendezvous run
        self.waiting: _Operation | None = None
        self._live = self._held = 0
        self._chunks: Counter[Action] = Counter()
        for a in actions:
            for part in a.parts:
                if part.op in COMPUTE or part.op in MESSAGE:
                    m = part.microbatch
                    if m is None or m >= self.n:
                        raise ScheduleError(f"{group}: {part} names no micro-batch below {self.n}; write e.g. 2F0")
                    t = self._find(part)
                    if part.op in COMPUTE:
                        self._compute(part, t, m)
                    else:
                        self._message(t, m)
        for t in self.templates.values():
            for send in t.after:
                for m in range(self.n):
                    if t.state[m] & _DONE and not send.state[m]:
                        raise ScheduleError(f"{group}: {send.at(m)} is never sent; add the action after {t.at(m)}")
            if t.action.op in _RECVS and (m := t.state.find(_OPEN)) >= 0:
                raise ScheduleError(f"{group}: {t.at(m)} is received but never waited for; add the wait")

    def _find(self, a: Action) -> _Template:
        key = (a.stage, a.op, a.edge)
        return self.templates.get(key) or self._unnamed.get(key) or self._template(a)

    def _template(self, a: Action) -> _Template:
        """The template of an action, made together with those around it."""
        a = a._replace(microbatch=None)
        if a.stage >= self.wiring.num_stages or self.wiring.group_of(a.stage) != self.group:
            where = "no unit of this model" if a.stage >= self.wiring.num_stages else f"on {self.wiring.group_of(a.stage)}"
            raise ScheduleError(f"{a} is in the list of {self.group}, but unit {a.stage} is {where}; move the action")
        key = (a.stage, a.op, a.edge)
        if key in self.templates:
            return self.templates[key]
        end = self.wiring.end(a) if a.op in MESSAGE else None
        if end is not None and a.edge is None:
            t = self._unnamed[key] = self._template(a._replace(edge=end.kind))
            return t
        t = self.templates[key] = _Template(a, bytearray(self.n), end=end)
        if end is None or end.sending:
            t.before = [self._template(b) for b in self.wiring.before(a)]
        if end is None:
            t.after = [self._template(b) for b in self.wiring.after(a)]
            other = {Op.BACKWARD: Op.BACKWARD_INPUT, Op.BACKWARD_INPUT: Op.BACKWARD}.get(a.op)
            t.partner = self._template(a._replace(op=other)) if other else None
        else:
            t.operations = [None] * self.n
            other = _PARTNERS.get(a.op)
            t.partner = self._template(a._replace(op=other)) if other else None
        return t

    def _message(self, t: _Template, m: int) -> None:
        op, state = t.action.op, t.state
        if op in SENDS:
            for need in t.before:
                if not need.state[m]:
                    raise ScheduleError(f"{self.group}: {t.at(m)} comes before {need.at(m)}; send what is there")
            if state[m]:
                raise ScheduleError(f"{self.group}: {t.at(m)} comes twice; send once")
            state[m] = _DONE
        elif op in _RECVS:
            if state[m]:
                raise ScheduleError(f"{self.group}: {t.at(m)} comes twice; post each receive once")
            state[m] = _OPEN
        else:
            assert t.partner is not None
            if t.partner.state[m] != _OPEN:
                raise ScheduleError(
                    f"{self.group}: {t.at(m)} comes twice or before its receive was posted; post it before, wait once"
                )
            t.partner.state[m] = state[m] = _DONE
        self.steps.append((t, m))

    def _compute(self, a: Action, t: _Template, m: int) -> None:
        for need in t.before:
            if not need.state[m]:
                raise ScheduleError(f"{self.group}: {a} comes before {need.at(m)}; it needs its result")
        if t.state[m] or (t.partner is not None and t.partner.state[m] & _DONE):
            raise ScheduleError(f"{self.group}: {a} comes twice; compute each unit once, backward as B or as I and W")
        t.state[m] = _DONE
        if a.op is Op.BACKWARD_INPUT and t.partner is not None:  # whoever needs the unit's gradient has it now
            t.partner.state[m] |= _GIVEN
        if a.edge is None or self._counts(a):
            self._live += (a.op is Op.FORWARD) - (a.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT))
            self._held += (a.op is Op.BACKWARD_INPUT) - (a.op is Op.BACKWARD_WEIGHT)
            self.peak_live, self.peak_held = max(self.peak_live, self._live), max(self.peak_held, self._held)

    def _counts(self, a: Action) -> bool:
        """A unit computed in chunks is live from its first forward chunk to its last backward chunk."""
        whole = a._replace(edge=None)
        self._chunks[whole] += 1
        return self._chunks[whole] == (1 if a.op is Op.FORWARD else self._chunks[whole._replace(op=Op.FORWARD)])


def _check_complete(schedule: Schedule, wiring: Wiring, scans: dict[str, _Scan]) -> None:
    n = schedule.num_microbatches
    what = f"a step of {wiring.num_stages} units and {n} micro-batches computes each once"
    want = wiring.computations(schedule)
    for a in sorted(want, key=lambda a: (a.stage, a.op)):
        scan = scans[wiring.group_of(a.stage)]
        t = scan.templates.get((a.stage, a.op, a.edge))
        for m in range(n):
            if t is None or not t.state[m]:
                raise ScheduleError(f"{a._replace(microbatch=m)} is missing; {what}")
            if t.state[m] == _GIVEN:
                w = scan.templates.get((a.stage, Op.BACKWARD_WEIGHT, a.edge))
                if w is None or not w.state[m]:
                    raise ScheduleError(
                        f"{Action(a.stage, Op.BACKWARD_INPUT, m)} has no {Action(a.stage, Op.BACKWARD_WEIGHT, m)}; "
                        "its weight gradient would be lost"
                    )
    for scan in scans.values():
        for t in scan.templates.values():
            whole = t.action._replace(op=Op.BACKWARD) if t.action.op in (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT) else t.action
            if t.end is None and whole not in want and any(t.state):
                raise ScheduleError(f"{t.at(next(m for m in range(n) if t.state[m]))} is not part of this model's step; {what}")


class _Rendezvous:
    """Run all lists with messages that meet."""

    def __init__(self, scans: dict[str, _Scan]) -> None:
        self.scans = scans
        self.queues: dict[tuple[str, str], deque[_Operation]] = {}
        self.channels: dict[tuple[object, ...], _Channel] = {}
        self.ready: deque[_Scan] = deque(scans.values())
        for scan in scans.values():
            for t in scan.templates.values():
                if t.end is not None and t.action.op in _POSTS:
                    if not t.end.paired:
                        ends = (scan.group, t.end.peer) if t.end.sending else (t.end.peer, scan.group)
                        t.channel = self.channels.setdefault((t.end.communicator, *ends), (deque(), deque()))
                    t.queue = None if t.end.unordered else self.queues.setdefault((scan.group, t.end.communicator), deque())

    def run(self) -> None:
        while self.ready:
            self._advance(self.ready.popleft())
        for scan in self.scans.values():
            if scan.waiting is not None:
                raise ScheduleError("deadlock: " + self._explain(scan))
        for sends, recvs in self.channels.values():
            for op in (*sends, *recvs):
                raise ScheduleError(f"{op.scan.group}: {op} never meets its other end; send and receive each message once")

    def _advance(self, scan: _Scan) -> None:
        steps = scan.steps
        i, n = scan.position, len(steps)
        while i < n:
            t, m = steps[i]
            if t.action.op in _WAITS:
                assert t.partner is not None
                op = t.partner.operations[m]
                if op is not None and not op.done:
                    scan.waiting = op
                    break
            else:
                channel = t.channel or self._pair(t, m)
                op = t.operations[m] = _Operation(scan, t, m, channel)
                channel[t.action.op in _RECVS].append(op)
                if t.queue is not None:
                    t.queue.append(op)
                if t.queue is None or t.queue[0] is op:
                    self._activate(op)
            i += 1
        scan.position = i

    def _pair(self, t: _Template, m: int) -> _Channel:
        assert t.end is not None
        return self.channels.setdefault((t.end.communicator, t.end.kind, t.end.layer, m), (deque(), deque()))

    def _activate(self, first: _Operation) -> None:
        todo = [first]
        while todo:
            op = todo.pop()
            op.active = True
            sends, recvs = op.channel
            while sends and recvs and sends[0].active and recvs[0].active:
                s, r = sends.popleft(), recvs.popleft()
                a, b = s.template.end, r.template.end
                assert a is not None and b is not None
                if s.microbatch != r.microbatch or a.kind != b.kind or a.layer != b.layer:
                    raise ScheduleError(
                        f"on {a.communicator} from {s.scan.group} to {r.scan.group}, {s} meets {r}: "
                        "messages of an edge arrive in the order they were sent; order both lists alike"
                    )
                for x in (s, r):
                    x.done = True
                    if x.scan.waiting is x:
                        x.scan.waiting = None
                        self.ready.append(x.scan)
                    queue = x.template.queue
                    if queue is not None:
                        queue.popleft()
                        if queue:
                            todo.append(queue[0])

    def _explain(self, scan: _Scan) -> str:
        """Follow who waits for whom until a group comes again."""
        seen: dict[str, int] = {}
        texts: list[str] = []
        while scan.waiting is not None and scan.group not in seen:
            seen[scan.group] = len(texts)
            op = scan.waiting
            head = self._head(op)
            t, m = scan.steps[scan.position]
            text = f"{scan.group} waits at {t.at(m)}"
            if head is not op:
                text += f", whose receive is behind {head}"
            assert head.template.end is not None
            peer = self.scans[head.template.end.peer]
            other = self._other(head)
            if other is None:
                text += f", {peer.group} has not reached the other end"
            elif not other.active:
                before = self._head(other)
                text += f", the other end {other} is behind {before} on {peer.group}"
                if peer.waiting is None and before.template.end is not None:
                    peer = self.scans[before.template.end.peer]
            texts.append(text)
            scan = peer
        tail = f", and {scan.group} is where the cycle closes" if scan.group in seen else f", and {scan.group} has ended its list"
        return "; ".join(texts[seen.get(scan.group, 0) :]) + tail

    def _head(self, op: _Operation) -> _Operation:
        return op if op.template.queue is None else op.template.queue[0]

    def _other(self, op: _Operation) -> _Operation | None:
        return next(iter(op.channel[op.template.action.op in SENDS]), None)
