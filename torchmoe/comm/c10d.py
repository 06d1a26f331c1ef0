"""Messages over torch.distributed process groups: gloo on CPU, NCCL on CUDA (host communicators are always gloo).

What gloo leaves out is added here. Its ``is_completed`` never turns true before ``wait`` and a wait that times out closes the
connections, so whoever asks :meth:`Work.done` has a small thread per (communicator, side, peer) wait, and reads its result;
whoever only waits does so in the calling thread, two switches of threads less per message. gloo's errors name neither
operation nor peer: ours name the operation, the communicator, the peer and the bytes.
"""

from __future__ import annotations

import atexit
import datetime
import json
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchmoe.comm.heartbeat import Finding, Heartbeat
from torchmoe.comm.transport import P2P, Message, Work, check_op
from torchmoe.errors import ConfigError, ExchangeError, ExchangeTimeout, PeerLost
from torchmoe.placement import Communicator, Deadlines

__all__ = ["C10dTransport", "is_lost"]

# The deadline is ours; gloo must never close a connection by itself while a receive is posted ahead of its turn.
FOREVER = datetime.timedelta(days=30)
LOST = (
    "closed by peer",
    "reset by peer",
    "Broken pipe",
    "caused pair closure",
    "refused",
    "not connected",
    "remote process exited",
)


LATE = ("Timed out", "timed out", "timeout")


def is_lost(error: BaseException) -> bool:
    """Whether an error says that some other rank is gone or late: one of ours, or what a torch.distributed collective raises."""
    if isinstance(error, (ExchangeError, dist.DistError)):
        return True
    return isinstance(error, RuntimeError) and any(s in str(error) for s in (*LOST, *LATE))


class _Op:
    """One message in flight. It keeps the buffer alive."""

    __slots__ = ("buffer", "ended", "error", "handed", "peer", "side", "work")

    def __init__(self, op: P2P, work: dist.Work | None) -> None:
        self.side, self.peer, self.buffer = op
        self.work = work
        self.ended = self.handed = False
        self.error: BaseException | None = None

    def who(self) -> str:
        return f"rank {self.peer}"

    def text(self) -> str:
        return f"{self.buffer.numel()} B {'to' if self.side == 'send' else 'from'} rank {self.peer}"


class _Swap(_Op):
    """A message to and from every other rank of a group, as one operation."""

    def __init__(self, ranks: Sequence[int], sent: Tensor, buffer: Tensor, work: dist.Work | None) -> None:
        super().__init__(P2P("recv", ranks[0], buffer), work)
        self.ranks, self.sent = list(ranks), sent

    def text(self) -> str:
        return f"{self.sent.numel()} B to and {self.buffer.numel()} B from ranks {self.ranks}"

    def who(self) -> str:
        return f"one of ranks {self.ranks}"


def translate(error: BaseException, what: str, communicator: str, op: _Op) -> ExchangeError:
    """The named error for what gloo or NCCL said about ``op``."""
    text = " ".join(str(error).split())
    where = f"{what}: {op.text()} on communicator {communicator!r}"
    if any(s in text for s in LOST):
        lost = PeerLost(
            f"{where} failed because {op.who()} closed the connection (it died, or gave up after an error of its own); "
            f"look at the log of the rank that failed first ({text[:160]})"
        )
        lost.peer = None if isinstance(op, _Swap) else op.peer
        return lost
    return ExchangeError(f"{where} failed: {text[:400]}; look at the log of {op.who()}")


def _stop(transport: weakref.ref[C10dTransport]) -> None:
    alive = transport()
    if alive is not None:
        alive.stop_threads()


class _Waiter(threading.Thread):
    """Waits for the messages of one (communicator, side, peer) in their order, which is the order gloo ends them in."""

    def __init__(self, name: str, changed: threading.Condition) -> None:
        super().__init__(name=name, daemon=True)
        self.queue: SimpleQueue[_Op | None] = SimpleQueue()
        self.changed = changed

    def run(self) -> None:
        while (op := self.queue.get()) is not None:
            try:
                if op.work is not None:
                    op.work.wait(FOREVER)
            except BaseException as e:
                op.error = e
            with self.changed:
                op.ended, op.work = True, None
                self.changed.notify_all()


class _Posted:
    """Operations posted together; ``poll`` makes progress visible, ``sleep(seconds)`` waits for a change."""

    def __init__(
        self,
        ops: list[_Op],
        what: str,
        communicator: str,
        *,
        poll: Callable[[list[_Op]], None],
        sleep: Callable[[float, list[_Op]], None],
        failed: Callable[[ExchangeError], ExchangeError],
        inline: bool,
    ) -> None:
        self._ops, self._what, self._communicator, self._inline = ops, what, communicator, inline
        self._poll, self._sleep, self._failed = poll, sleep, failed
        self._error: ExchangeError | None = None

    def done(self) -> bool:
        self._poll(self._ops)
        return all(op.ended for op in self._ops)

    def wait(self, timeout: float) -> None:
        end = time.monotonic() + timeout
        if self._inline and self._error is None:
            self._wait_inline(end)
        while self._error is None and not any(op.error for op in self._ops) and not self.done():
            left = end - time.monotonic()
            if left <= 0:
                self._expired(timeout)
                break
            self._sleep(left, self._ops)
        for op in self._ops:
            if op.error is not None and self._error is None:
                self._error = self._failed(translate(op.error, self._what, self._communicator, op))
        if self._error is not None:
            raise self._error

    def _wait_inline(self, end: float) -> None:
        """Wait in the calling thread for the operations that no other thread waits for, up to the first that fails. After one
        that is late gloo closes the connections; the others are asked, too, so that only those that did not end are named."""
        late = False
        for op in self._ops:
            if op.handed or op.ended or op.work is None:
                continue
            op.handed = True
            try:
                op.work.wait(datetime.timedelta(seconds=max(0.001, end - time.monotonic())))
            except RuntimeError as e:
                late = late or time.monotonic() >= end
                if not late:
                    op.error, op.ended = e, True
                    return
                continue
            op.ended, op.work = True, None

    def _expired(self, timeout: float) -> None:
        late = [op for op in self._ops if not op.ended]
        error = ExchangeTimeout(
            f"{self._what}: expected {', '.join(op.text() for op in late)} on communicator {self._communicator!r}, got nothing "
            f"within {timeout:g} s; {late[0].who()} is late, stuck or out of order: look at its log, "
            "or raise Deadlines.exchange"
        )
        self._error = self._failed(error)


class C10dTransport:
    """The :class:`~torchmoe.comm.transport.Transport` of real runs.

    Build it with :meth:`create`, on every rank of the default process group with the same list: process groups are created
    once, in the list's order, and never later.
    """

    def __init__(
        self,
        groups: dict[str, tuple[Communicator, dist.ProcessGroup]],
        *,
        device: torch.device,
        record: bool,
        heartbeat: Heartbeat | None = None,
    ) -> None:
        self.rank, self.world_size, self.device = dist.get_rank(), dist.get_world_size(), device
        self._groups, self._record = groups, record
        self._log: list[Message] = []
        self._broken: dict[str, str] = {}
        self._closed = False
        self._heartbeat = heartbeat
        self._changed = threading.Condition()
        self._waiters: dict[tuple[str, str, int], _Waiter] = {}

    @classmethod
    def create(
        cls,
        communicators: Sequence[Communicator],
        *,
        device: torch.device | str = "cpu",
        deadlines: Deadlines | None = None,
        record: bool = False,
        heartbeat: bool = True,
    ) -> C10dTransport:
        """Create the process groups of ``communicators``, in order. Collective over the default process group.

        Args:
            communicators: ``placement.communicators(residual)``; names may repeat for disjoint ranks (replicas).
            device: where payload buffers live. ``cpu``: gloo everywhere. ``cuda``: NCCL for payloads, gloo for host ones.
            deadlines: ``init`` bounds the creation of each group.
            record: keep the byte log that :meth:`log` returns.
            heartbeat: count up a key in the store, so that errors can name the rank that died first.

        Raises:
            ConfigError: torch.distributed is not initialized, a rank outside the world, or one name twice on this rank.
        """
        if not dist.is_initialized():
            raise ConfigError(
                "C10dTransport.create needs torch.distributed: call torch.distributed.init_process_group('gloo') "
                "(or 'cpu:gloo,cuda:nccl') first"
            )
        device = torch.device(device)
        limit = datetime.timedelta(seconds=(deadlines or Deadlines()).init)
        rank, world = dist.get_rank(), dist.get_world_size()
        groups: dict[str, tuple[Communicator, dist.ProcessGroup]] = {}
        for c in communicators:
            if any(not 0 <= r < world for r in c.ranks):
                raise ConfigError(
                    f"communicator {c.name!r} has ranks {list(c.ranks)}, the world has {world}; "
                    "start as many processes as the placement needs"
                )
            if rank in c.ranks and c.name in groups:
                raise ConfigError(f"communicator {c.name!r} appears twice on rank {rank}; names must be unique on a rank")
        _agree(communicators, rank, world, limit.total_seconds())
        for c in communicators:
            backend = "gloo" if c.host or device.type == "cpu" else "nccl"
            pg = dist.new_group(list(c.ranks), timeout=limit, backend=backend, group_desc=c.name)
            if rank in c.ranks:
                groups[c.name] = (c, pg)
                connect(c, pg, device)
        beat = Heartbeat(_own_store(), rank, world) if heartbeat else None
        transport = cls(groups, device=device, record=record, heartbeat=beat)
        atexit.register(_stop, weakref.ref(transport))
        return transport

    def __repr__(self) -> str:
        names = ", ".join(f"{n}{list(c.ranks)}" for n, (c, _) in self._groups.items())
        return f"C10dTransport(rank={self.rank}, device={self.device}, {names})"

    def post(self, communicator: str, ops: Sequence[P2P], what: str) -> Work:
        """Start all of ``ops`` and return. See :class:`~torchmoe.comm.transport.Transport`."""
        c, pg = self._group(communicator, what)
        for op in ops:
            b = check_op(op, self.rank, c, what)
            host = c.host or self.device.type == "cpu"
            if (b.device.type == "cpu") != host:
                raise ConfigError(
                    f"{what}: the buffer is on {b.device}, communicator {communicator!r} carries "
                    f"{'CPU' if host else self.device.type} memory; allocate the buffer there"
                )
        if self._record:
            self._log += [Message(communicator, self.rank, op.peer, op.buffer.numel()) for op in ops if op.side == "send"]
        if c.host or self.device.type == "cpu":
            return self._post_gloo(c, pg, ops, what)
        return self._post_nccl(c, pg, ops, what)

    def members(self, communicator: str) -> tuple[int, ...]:
        """Global ranks of a communicator, in its order."""
        return self._group(communicator, "members")[0].ranks

    def swap(
        self,
        communicator: str,
        send: Tensor,
        send_bytes: Sequence[int],
        recv: Tensor,
        recv_bytes: Sequence[int],
        *,
        what: str,
    ) -> Work:
        """One all-to-all collective. See :class:`~torchmoe.comm.transport.SwapTransport`."""
        c, pg = self._group(communicator, what)
        if self._record:
            pairs = zip(c.ranks, send_bytes, strict=True)
            self._log += [Message(communicator, self.rank, r, n) for r, n in pairs if n and r != self.rank]
        others = [r for r in c.ranks if r != self.rank]
        gloo = c.host or self.device.type == "cpu"
        try:
            work = dist.all_to_all_single(recv, send, list(recv_bytes), list(send_bytes), group=pg, async_op=True)
        except RuntimeError as e:
            raise self._fail(c.name, translate(e, what, c.name, _Swap(others, send, recv, None))) from None
        op = _Swap(others, send, recv, work)
        if not gloo:
            return self._handle(c, [op], what, _poll_nccl, _sleep_nccl)
        return self._handle_gloo(c, [op], what)

    def _group(self, communicator: str, what: str) -> tuple[Communicator, dist.ProcessGroup]:
        if self._closed:
            raise ConfigError(f"{what}: the transport of rank {self.rank} was closed; create another for more messages")
        if communicator not in self._groups:
            raise ConfigError(
                f"{what}: rank {self.rank} is not in a communicator {communicator!r}; it has {', '.join(self._groups) or 'none'}"
            )
        if communicator in self._broken:
            raise PeerLost(
                f"{what}: communicator {communicator!r} is unusable since an earlier error: {self._broken[communicator]}"
            )
        return self._groups[communicator]

    def log(self) -> list[Message]:
        """Every message sent so far, in order; empty unless ``record=True``."""
        return list(self._log)

    def report(self, error: BaseException) -> None:
        """Tell the other ranks why this one gives up, for errors that did not come from this transport."""
        if self._heartbeat is not None:
            self._heartbeat.report(f"{type(error).__name__}: {error}")

    def examine(self) -> Finding:
        """Which ranks are dead, and which gave up first. Takes about half a second; nothing is found without a heartbeat."""
        return Finding() if self._heartbeat is None else self._heartbeat.examine()

    def stop_threads(self) -> None:
        """End the heartbeat and the waiters. Registered for the interpreter's exit: a thread that is inside the store or gloo
        while the interpreter shuts down aborts the process."""
        if self._heartbeat is not None:
            self._heartbeat.close()
            self._heartbeat = None
        for waiter in self._waiters.values():
            waiter.queue.put(None)
        for waiter in self._waiters.values():
            waiter.join(0.1)
        self._waiters.clear()

    def close(self) -> None:
        """Release the communicators. Messages in flight are abandoned."""
        self._closed = True
        self.stop_threads()
        for _, pg in self._groups.values():
            if dist.is_initialized():
                dist.destroy_process_group(pg)
        self._groups = {}

    # ---- gloo
    def _post_gloo(self, c: Communicator, pg: dist.ProcessGroup, ops: Sequence[P2P], what: str) -> Work:
        posted: list[_Op] = []
        for op in ops:
            try:  # what dist.isend and irecv call; their own checks cost as much again
                peer = dist.get_group_rank(pg, op.peer)
                work = pg.send([op.buffer], peer, 0) if op.side == "send" else pg.recv([op.buffer], peer, 0)
            except RuntimeError as e:
                raise self._fail(c.name, translate(e, what, c.name, _Op(op, None))) from None
            posted.append(_Op(op, work))
        return self._handle_gloo(c, posted, what)

    def _handle_gloo(self, c: Communicator, ops: list[_Op], what: str) -> Work:
        return self._handle(c, ops, what, lambda ops: self._hand_over(c.name, ops), self._sleep_gloo, True)

    def _hand_over(self, name: str, ops: list[_Op]) -> None:
        """Let the waiting threads have the operations that they do not have yet."""
        for op in ops:
            if op.handed or op.ended:
                continue
            op.handed = True
            key = (name, op.side, op.peer)
            waiter = self._waiters.get(key)
            if waiter is None:
                waiter = self._waiters[key] = _Waiter(f"torchmoe {name} {op.side} {op.peer}", self._changed)
                waiter.start()
            waiter.queue.put(op)

    def _sleep_gloo(self, seconds: float, ops: list[_Op]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: all(o.ended for o in ops) or any(o.error for o in ops), min(seconds, 1.0))

    # ---- NCCL
    def _post_nccl(self, c: Communicator, pg: dist.ProcessGroup, ops: Sequence[P2P], what: str) -> Work:
        if not ops:
            return self._handle(c, [], what, _poll_nccl, _sleep_nccl)
        batch = [dist.P2POp(dist.isend if op.side == "send" else dist.irecv, op.buffer, op.peer, group=pg) for op in ops]
        works = dist.batch_isend_irecv(batch)  # one coalesced work: it ends when all of them have ended
        posted = [_Op(op, works[i] if len(works) == len(ops) else works[0]) for i, op in enumerate(ops)]
        return self._handle(c, posted, what, _poll_nccl, _sleep_nccl)

    def _handle(
        self,
        c: Communicator,
        ops: list[_Op],
        what: str,
        poll: Callable[[list[_Op]], None],
        sleep: Callable[[float, list[_Op]], None],
        inline: bool = False,
    ) -> Work:
        return _Posted(ops, what, c.name, poll=poll, sleep=sleep, failed=lambda e: self._fail(c.name, e), inline=inline)

    def _fail(self, name: str, error: ExchangeError) -> ExchangeError:
        """``error`` with the names of the ranks that failed first. The communicator is unusable from now on; a hung NCCL
        kernel is aborted, else the process could not even end."""
        if self._closed:
            return error
        c, pg = self._groups[name]
        if not (c.host or self.device.type == "cpu"):
            pg.abort()
        verdict = ""
        if self._heartbeat is not None:
            self._heartbeat.report(f"{type(error).__name__}: {error}")
            verdict = self._heartbeat.verdict()
        if verdict:
            error = type(error)(f"{error} [{verdict}]")
        self._broken.setdefault(name, str(error))
        return error


def connect(c: Communicator, pg: dist.ProcessGroup, device: torch.device) -> None:
    """Make the NCCL communicator of a group, on all its ranks. NCCL makes it at the group's first use, which hangs if that is a
    batch of messages between some of the ranks only (``torch.distributed.batch_isend_irecv``), as ours are."""
    if not c.host and device.type == "cuda":
        dist.all_reduce(torch.zeros(1, device=device), group=pg)


def _agree(communicators: Sequence[Communicator], rank: int, world: int, seconds: float) -> None:
    """Refuse, on all ranks, lists that differ: process groups made from different lists hang at their first use."""
    store = dist.distributed_c10d._get_default_store()
    number = store.add(f"torchmoe/created/{rank}", 1)
    mine = [[c.name, list(c.ranks), c.host] for c in communicators]
    key, agreed, refused = (f"torchmoe/{word}/{number}" for word in ("communicators", "agreed", "refused"))
    if rank == 0:
        store.set(key, json.dumps(mine))
    theirs = json.loads(store.get(key))
    for i in range(max(len(mine), len(theirs))):
        a, b = (x[i] if i < len(x) else "nothing" for x in (mine, theirs))
        if a != b:
            text = f"communicator {i} is {a} on rank {rank} and {b} on rank 0; build all ranks from one placement and residual"
            store.set(refused, text)
            raise ConfigError(text)
    store.add(agreed, 1)
    end = time.monotonic() + seconds
    while (there := store.add(agreed, 0)) < world:
        if store.check([refused]):
            raise ConfigError(store.get(refused).decode())
        if time.monotonic() > end:
            raise ExchangeTimeout(
                f"only {there} of {world} ranks create the communicators after {seconds:g} s; "
                "call C10dTransport.create on all ranks, or raise Deadlines.init"
            )
        time.sleep(0.002)


def _own_store() -> Any:
    """A connection of our own to the default store: a store object serves one operation at a time."""
    store = dist.distributed_c10d._get_default_store()
    return store.clone() if hasattr(store, "clone") else store


def _poll_nccl(ops: list[_Op]) -> None:
    for op in ops:
        if not op.ended and op.work is not None:
            try:
                op.ended = op.work.is_completed()  # queries the CUDA event; the data is in memory when it says yes
            except RuntimeError as e:
                op.error, op.ended = e, True


def _sleep_nccl(seconds: float, ops: list[_Op]) -> None:
    time.sleep(min(seconds, 50e-6))
