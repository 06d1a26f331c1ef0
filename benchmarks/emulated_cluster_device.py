"""The emulated device and links of one rank: a compute engine in model time, sends that follow it, and in-process pacing."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.emulated_cluster_net import Cluster, Loopback
from torchmoe.comm.c10d import C10dTransport
from torchmoe.comm.transport import P2P, Message, Work
from torchmoe.pipeline.trace import Event
from torchmoe.placement import Communicator

__all__ = ["TIMEOUT", "Device", "Paced", "StreamTransport"]

TIMEOUT = 120.0
"""Seconds after which a wait for one message gives up."""


class Device:
    """A compute engine in model time: it does one thing after the other, each for its seconds."""

    def __init__(self, rank: int, group: str) -> None:
        self.rank, self.group = rank, group
        self.events: list[Event] = []
        self.last_end = 0.0
        self._queue: queue.SimpleQueue[tuple[float, str, float] | Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def work(self, seconds: float, label: str) -> None:
        """Queue a computation."""
        self._queue.put((seconds, label, time.monotonic()))

    def then(self, call: Callable[[], None]) -> None:
        """Call when everything queued so far has ended."""
        self._queue.put(call)

    def drain(self) -> None:
        """Wait until everything queued so far has ended."""
        ended = threading.Event()
        self.then(ended.set)
        ended.wait()

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        free = 0.0
        while (item := self._queue.get()) is not None:
            if callable(item):
                item()
                continue
            seconds, label, queued = item
            start = max(free, queued)  # not "now": what a sleep overshoots must not add up
            free = start + seconds
            if (left := free - time.monotonic()) > 0:
                time.sleep(left)
            if seconds:
                self.last_end = free
                stream = "backward" if label.lstrip("0123456789")[:1] in "BIW" else "compute"
                self.events.append(Event(self.rank, self.group, stream, label, "compute", start, free))


class _Later:
    """A send that starts when the device gets there. It is done once somebody has waited for it."""

    def __init__(self) -> None:
        self.inner: Work | None = None
        self.error: BaseException | None = None
        self.posted = threading.Event()
        self.ended = False
        self._lock = threading.Lock()

    def done(self) -> bool:
        return self.error is not None or self.ended

    def wait(self, timeout: float) -> None:
        self.posted.wait(timeout)
        if self.error is not None:
            raise self.error
        with self._lock:  # the finisher and the issuing thread may both wait
            if not self.ended:
                assert self.inner is not None
                self.inner.wait(timeout)
                self.ended = True


class _Finisher(threading.Thread):
    """Waits for sends in their order: one thread for all, since the ranks share few cores."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.queue: queue.SimpleQueue[_Later | None] = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        while (later := self.queue.get()) is not None:
            try:
                later.wait(TIMEOUT)
            except BaseException as e:
                later.error = e


class StreamTransport:
    """A transport whose sends follow the device's computations. Host communicators have a network of their own."""

    def __init__(self, cluster: Cluster | Loopback, names: Sequence[Communicator], device: Device) -> None:
        self.device = device
        self._finisher = _Finisher()
        # nobody polls these: the issuing thread waits for receives, the finisher for sends
        self.fabric: Any = C10dTransport.create([c for c in names if not c.host], heartbeat=False)
        cluster.use("host")
        self.host: Any = C10dTransport.create([c for c in names if c.host], heartbeat=False)
        cluster.use("fabric")
        if isinstance(cluster, Loopback):
            self.fabric = Paced(self.fabric, cluster.rate)
        self.host_names = {c.name for c in names if c.host}
        self.rank, self.world_size = self.fabric.rank, self.fabric.world_size

    def post(self, communicator: str, ops: Sequence[P2P], what: str) -> Work:
        inner = self.host if communicator in self.host_names else self.fabric
        if not ops or ops[0].side == "recv":
            return inner.post(communicator, ops, what)
        later = _Later()

        def start() -> None:
            try:
                later.inner = inner.post(communicator, ops, what)
            except BaseException as e:
                later.error = e
            later.posted.set()

        self.device.then(start)
        self._finisher.queue.put(later)
        return later

    def log(self) -> list[Message]:
        return [*self.fabric.log(), *self.host.log()]

    def close(self) -> None:
        self._finisher.queue.put(None)
        self._finisher.join()
        self.fabric.close()
        self.host.close()


class Paced:
    """Loopback mode: a transport behind a link of ``rate`` bytes per second each way (approximate: first in, first out)."""

    def __init__(self, inner: C10dTransport, rate: float) -> None:
        self.inner, self.rate = inner, rate
        self.rank, self.world_size = inner.rank, inner.world_size
        self._out = Device(inner.rank, "")
        self._in_free = 0.0
        self._lock = threading.Lock()

    def post(self, communicator: str, ops: Sequence[P2P], what: str) -> Work:
        size = sum(op.buffer.numel() for op in ops)
        if not ops or size < 4096:  # counts and ids
            return self.inner.post(communicator, ops, what)
        if ops[0].side == "recv":
            return _Slow(self.inner.post(communicator, ops, what), self, size / self.rate)
        later = _Later()

        def start() -> None:
            try:
                later.inner = self.inner.post(communicator, ops, what)
            except BaseException as e:
                later.error = e
            later.posted.set()

        self._out.work(size / self.rate, "")
        self._out.then(start)
        return later

    def take(self, seconds: float) -> float:
        """When a message that is here by now would be through the link."""
        now = time.monotonic()
        with self._lock:
            self._in_free = max(self._in_free, now - seconds) + seconds
            return self._in_free

    def log(self) -> list[Message]:
        return self.inner.log()

    def close(self) -> None:
        self._out.close()
        self.inner.close()


class _Slow:
    """A receive that ends when its bytes would be through the receiver's link."""

    def __init__(self, inner: Work, link: Paced, seconds: float) -> None:
        self._inner, self._link, self._seconds = inner, link, seconds
        self._end: float | None = None

    def done(self) -> bool:
        if self._end is None and self._inner.done():
            self._end = self._link.take(self._seconds)
        return self._end is not None and time.monotonic() >= self._end

    def wait(self, timeout: float) -> None:
        self._inner.wait(timeout)
        if self._end is None:
            self._end = self._link.take(self._seconds)
        time.sleep(max(0.0, self._end - time.monotonic()))
