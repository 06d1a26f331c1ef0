"""Many ranks in one process: a rendezvous transport between threads that proves deadlocks instead of timing out.

A send ends when its receive is posted and the other way round (gloo does the same at every size). What else an operation waits
for is the ``mode``: "async" nothing (gloo), "comm" the earlier operations of its communicator on its rank (NCCL), "rank" all
earlier operations of its rank. Host communicators are always "async".
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Literal

import torch

from torchmoe.comm.transport import P2P, Message, Work, check_op
from torchmoe.errors import ConfigError, ExchangeError, ExchangeTimeout, PeerLost
from torchmoe.placement import Communicator

__all__ = ["Deadlock", "Mode", "SimHub", "SimTransport"]

Mode = Literal["async", "comm", "rank"]
Key = tuple[int, str, int, int]  # (transport number, communicator, source, destination)


class Deadlock(ExchangeError):
    """All ranks wait for each other. The message says who waits in what."""


class _Op:
    """One message end. Active once nothing of its stream is ahead of it; done once both ends were active."""

    __slots__ = ("active", "batch", "buffer", "copied", "error", "key", "peer", "posted", "ready_at", "side", "what")

    def __init__(self, op: P2P, key: Key, batch: _Batch, what: str) -> None:
        self.side, self.peer, self.buffer = op
        self.key, self.batch, self.what = key, batch, what
        self.active = False
        self.ready_at: float | None = None
        self.error: ExchangeError | None = None
        self.copied: torch.cuda.Event | None = None
        self.posted: torch.cuda.Event | None = None
        if self.buffer.is_cuda:
            self.posted = torch.cuda.current_stream(self.buffer.device).record_event()

    def text(self) -> str:
        side = "to" if self.side == "send" else "from"
        return f"{self.what} ({self.buffer.numel()} B {side} rank {self.peer} on {self.key[1]!r})"

    def ended(self, now: float) -> bool:
        if self.error is not None or self.ready_at is None or self.ready_at > now:
            return self.error is not None
        return self.copied is None or bool(self.copied.query())  # type: ignore[no-untyped-call]


class _Batch:
    """Operations posted together on one stream."""

    def __init__(self, rank: int, stream: object) -> None:
        self.rank, self.stream = rank, stream
        self.ops: list[_Op] = []
        self.missing = 0
        self.failed = False


class _Work:
    def __init__(self, hub: SimHub, batch: _Batch) -> None:
        self._hub, self._batch = hub, batch

    def done(self) -> bool:
        return self._hub.done(self._batch)

    def wait(self, timeout: float) -> None:
        self._hub.wait(self._batch, timeout)


class SimHub:
    """What all ranks of a simulation share: the queues, the log, who waits and who has left.

    Args:
        world: number of ranks.
        mode: what an operation waits for besides its other end, see the module.
        delay: seconds a message is under way after both ends met, from (communicator, source, destination, bytes); default 0.
    """

    def __init__(self, world: int, *, mode: Mode = "async", delay: Callable[[str, int, int, int], float] | None = None) -> None:
        if mode not in ("async", "comm", "rank"):
            raise ConfigError(f"mode={mode!r} is unknown; use 'async' (gloo), 'comm' (NCCL) or 'rank'")
        self.world, self.mode, self.delay = world, mode, delay
        self.log: list[Message] = []
        self.failed: ExchangeError | None = None
        self._lock = threading.Lock()
        # one condition per rank: waking all of 256 ranks for every message would be quadratic
        self._changed = [threading.Condition(self._lock) for _ in range(world)]
        self._live = set(range(world))
        self._left: dict[int, str] = {}
        self._first: tuple[int, str] | None = None
        self._streams: dict[object, deque[_Batch]] = defaultdict(deque)
        self._sends: dict[Key, deque[_Op]] = defaultdict(deque)
        self._recvs: dict[Key, deque[_Op]] = defaultdict(deque)
        self._waiting: dict[int, _Batch] = {}
        self._device_streams: dict[tuple[int, str, int], torch.cuda.Stream] = {}

    # ---- called by transports
    def post(self, rank: int, number: int, communicator: str, ops: Sequence[P2P], what: str, *, host: bool) -> Work:
        with self._lock:
            self._check()
            stream: object = (rank, number, communicator) if self.mode == "comm" else rank
            if host or self.mode == "async":
                stream = object()
            batch = _Batch(rank, stream)
            for op in ops:
                key = (number, communicator, rank, op.peer) if op.side == "send" else (number, communicator, op.peer, rank)
                end = _Op(op, key, batch, what)
                batch.ops.append(end)
                mine, theirs = self._sends[key], self._recvs[key]
                if op.side == "recv":
                    mine, theirs = theirs, mine
                if op.peer in self._left and len(theirs) <= len(mine):
                    end.error = self._lost(end)
                    batch.failed = True
                else:
                    mine.append(end)
                    batch.missing += 1
            if batch.missing:
                queue = self._streams[stream]
                queue.append(batch)
                if queue[0] is batch:
                    self._activate(batch)
            return _Work(self, batch)

    def done(self, batch: _Batch) -> bool:
        with self._lock:
            now = time.monotonic()
            return self.failed is not None or (not batch.missing and all(op.ended(now) for op in batch.ops))

    def wait(self, batch: _Batch, timeout: float) -> None:
        end = time.monotonic() + timeout
        with self._lock:
            self._waiting[batch.rank] = batch
            try:
                while True:
                    error = next((op.error for op in batch.ops if op.error is not None), None)
                    if error is not None:
                        raise error
                    now = time.monotonic()
                    if not batch.missing and all(op.ended(now) for op in batch.ops):
                        return
                    self._prove()
                    self._check()
                    if now >= end:
                        late = [op for op in batch.ops if not op.ended(now)]
                        raise ExchangeTimeout(
                            f"expected {', '.join(op.text() for op in late)}, got nothing within {timeout:g} s; "
                            f"rank {late[0].peer} is late, stuck or out of order"
                        )
                    ready = [op.ready_at for op in batch.ops if op.ready_at is not None and op.ready_at > now]
                    if not batch.missing and not ready:
                        ready = [now + 50e-6]  # copies on a device tell nobody when they end
                    self._changed[batch.rank].wait(min([end, *ready]) - now)
            finally:
                del self._waiting[batch.rank]

    def leave(self, rank: int, reason: str | None = None) -> None:
        """``rank`` ended: what others still expect of it fails with PeerLost. If it failed, its posted messages are void."""
        with self._lock:
            self._live.discard(rank)
            if reason is not None and self._first is None:
                self._first = rank, reason
            self._left[rank] = reason or "it ended without posting this message"
            for mine, others in ((self._sends, self._recvs), (self._recvs, self._sends)):
                for key, queue in list(mine.items()):
                    lost = [op for op in queue if op.batch.rank == rank] if reason is not None else []
                    if queue and queue[0].peer == rank:
                        lost = list(queue)[len(others.get(key, ())) if reason is None else 0 :]
                    for op in lost:
                        queue.remove(op)
                        op.error = self._lost(op)
                        following = self._end(op)
                        if following is not None:
                            self._activate(following)
            self._prove()

    def fail(self, error: ExchangeError) -> None:
        """End the simulation: every rank that posts or waits raises ``error``."""
        with self._lock:
            self.failed = self.failed or error
            self._wake_all()

    # ---- inside the lock
    def _check(self) -> None:
        if self.failed is not None:
            raise type(self.failed)(str(self.failed))

    def _lost(self, op: _Op) -> PeerLost:
        first = f" [first to fail was rank {self._first[0]}: {self._first[1]}]" if self._first is not None else ""
        return PeerLost(f"{op.text()} failed because rank {op.peer} has left: {self._left.get(op.peer, 'it ended')}{first}")

    def _prove(self) -> None:
        """All live ranks blocked, nothing under way: a deadlock, whatever the deadlines are."""
        if self.failed is not None or not self._live or len(self._waiting) < len(self._live):
            return
        if any(not batch.missing or batch.failed for batch in self._waiting.values()):
            return  # woken, or its message is under way
        now = time.monotonic()
        lines = []
        for rank, batch in sorted(self._waiting.items()):
            lines.append(f"rank {rank} waits in {next(op.text() for op in batch.ops if not op.ended(now))}")
        self.failed = Deadlock(f"deadlock of {len(lines)} ranks: " + "; ".join(lines[:16]) + ("; ..." if len(lines) > 16 else ""))
        self._wake_all()

    def _wake_all(self) -> None:
        for changed in self._changed:
            changed.notify_all()

    def _activate(self, batch: _Batch) -> None:
        todo = [batch]
        while todo:
            current = todo.pop()
            for op in current.ops:
                op.active = True
            for op in list(current.ops):
                sends, recvs = self._sends.get(op.key), self._recvs.get(op.key)
                while sends and recvs and sends[0].active and recvs[0].active:
                    send, recv = sends.popleft(), recvs.popleft()
                    self._deliver(send, recv)
                    todo += [b for end in (send, recv) if (b := self._end(end)) is not None]
                for queues, queue in ((self._sends, sends), (self._recvs, recvs)):
                    if queue is not None and not queue:
                        del queues[op.key]

    def _deliver(self, send: _Op, recv: _Op) -> None:
        _, communicator, source, destination = send.key
        if send.buffer.numel() != recv.buffer.numel():
            text = f"sent {send.what} of {send.buffer.numel()} B, expected {recv.what} of {recv.buffer.numel()} B"
            for op in (send, recv):
                op.error = ExchangeError(
                    f"message from rank {source} to rank {destination} on {communicator!r}: {text}; "
                    "the two ranks disagree on the order or the size of their messages"
                )
            return
        self.log.append(Message(communicator, source, destination, send.buffer.numel()))
        late = self.delay(communicator, source, destination, send.buffer.numel()) if self.delay is not None else 0.0
        if send.posted is not None and recv.posted is not None:
            send.copied = recv.copied = self._copy_on_device(send, recv, late)
            late = 0.0
        else:
            recv.buffer.copy_(send.buffer)
        send.ready_at = recv.ready_at = time.monotonic() + late if late else 0.0

    def _copy_on_device(self, send: _Op, recv: _Op, late: float) -> torch.cuda.Event:
        """As NCCL does: on a stream of the receiver's communicator, after what both ends' streams had queued at their posts."""
        number, communicator, _, destination = recv.key
        device = recv.buffer.device
        stream = self._device_streams.setdefault((number, communicator, destination), torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            for event in (send.posted, recv.posted):
                if event is not None:
                    stream.wait_event(event)
            if late:
                torch.cuda._sleep(int(late * 1e9))  # type: ignore[no-untyped-call] # cycles: about a second per 1e9 of them
            recv.buffer.copy_(send.buffer, non_blocking=True)
            copied: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(stream)
        return copied

    def _end(self, op: _Op) -> _Batch | None:
        """Count ``op`` as ended; the next batch of its stream if that made room."""
        batch = op.batch
        batch.missing -= 1
        batch.failed |= op.error is not None
        if not batch.missing or batch.failed:
            self._changed[batch.rank].notify_all()
        if batch.missing:
            return None
        queue = self._streams[batch.stream]
        if batch in queue:
            first = queue[0] is batch
            queue.remove(batch)
            if queue and first:
                return queue[0]
        if not queue:
            del self._streams[batch.stream]
        return None


class SimTransport:
    """The :class:`~torchmoe.comm.transport.Transport` of one simulated rank."""

    def __init__(self, hub: SimHub, rank: int, number: int, communicators: Sequence[Communicator], *, record: bool) -> None:
        self.rank, self.world_size = rank, hub.world
        self._hub, self._number, self._record = hub, number, record
        self._groups = {c.name: c for c in communicators if rank in c.ranks}
        self._closed = False
        self._log: list[Message] = []

    def __repr__(self) -> str:
        return f"SimTransport(rank={self.rank} of {self.world_size}, {', '.join(self._groups)})"

    def post(self, communicator: str, ops: Sequence[P2P], what: str) -> Work:
        if self._closed:
            raise ConfigError(f"{what}: the transport of rank {self.rank} was closed; create another for more messages")
        group = self._groups.get(communicator)
        if group is None:
            raise ConfigError(
                f"{what}: rank {self.rank} is not in a communicator {communicator!r}; it has {', '.join(self._groups) or 'none'}"
            )
        for op in ops:
            check_op(op, self.rank, group, what)
        if self._record:
            self._log += [Message(communicator, self.rank, op.peer, op.buffer.numel()) for op in ops if op.side == "send"]
        return self._hub.post(self.rank, self._number, communicator, ops, what, host=group.host)

    def log(self) -> list[Message]:
        return list(self._log)

    def close(self) -> None:
        self._closed = True
        self._groups = {}
