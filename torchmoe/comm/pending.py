"""Handles of posted operations, and the checks of what has arrived."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from torchmoe.comm.transport import Work
from torchmoe.comm.wire import Header, Layout

__all__ = ["Arrivals", "Key", "Pending"]

T_co = TypeVar("T_co", covariant=True)


class Key(NamedTuple):
    """Which unit a message belongs to: MoE layer and micro-batch."""

    layer: int
    microbatch: int


class Pending(Generic[T_co]):
    """A posted half of an operation. It owns its buffers until it is done; dropping it before that is warned about.

    Args:
        work: the transport's handle.
        timeout: seconds :meth:`wait` may take.
        finish: makes the result from the received bytes; called once, by the first :meth:`wait`.
        what: the operation's name.
        num_bytes: bytes of all its messages.
    """

    def __init__(self, work: Work, timeout: float, finish: Callable[[], T_co], *, what: str = "", num_bytes: int = 0) -> None:
        self._work: Work | None = work
        self._timeout = timeout
        self._finish: Callable[[], T_co] | None = finish
        self._result: T_co | None = None
        self._error: Exception | None = None
        self._ended = False
        self.what = what
        self.num_bytes = num_bytes

    def __repr__(self) -> str:
        state = "failed" if self._error is not None else "done" if self.done() else "in flight"
        return f"Pending({self.what}, {self.num_bytes} B, {state})"

    def __del__(self) -> None:
        # asks nobody: the garbage collector may come while a transport holds its lock
        if getattr(self, "_work", None) is not None and self._error is None and not self._ended:
            warnings.warn(f"{self.what} was dropped while in flight; keep its handle and wait() for it", ResourceWarning, 2)

    def done(self) -> bool:
        """Whether the messages have ended. Never blocks."""
        self._ended = self._work is None or self._work.done()
        return self._ended

    def wait(self) -> T_co:
        """Block until the messages have ended; a second call returns the same result or raises the same error.

        Raises:
            ExchangeTimeout: not within the deadline.
            PeerLost: a peer died.
            ExchangeError: a message was not the expected one.
        """
        if self._error is not None:
            raise self._error
        if self._finish is not None and self._work is not None:
            try:
                self._work.wait(self._timeout)
                self._result = self._finish()
            except Exception as e:
                self._error = e
                raise
            self._finish = self._work = None
        return self._result  # type: ignore[return-value]


class Arrivals:
    """Checks received messages. On a GPU with fixed sizes the proof is copied to the host without waiting for the device, and
    read by a later operation; else it is read at once.

    Args:
        deferred: read later.
    """

    def __init__(self, *, deferred: bool) -> None:
        self._deferred = deferred
        self._open: list[tuple[torch.cuda.Event | None, Tensor, Callable[[list[int]], None]]] = []

    def check(self, layout: Layout, buffer: Tensor, expected: Header, what: str) -> None:
        """Check one message and clear its header.

        Raises:
            ExchangeError: it, or an earlier one whose check was deferred, is not the message expected.
        """
        if not self._deferred:
            layout.check(layout.proof(buffer), buffer, expected, what)
            return
        words = layout.proof_on_device(buffer)
        event = None
        if buffer.device.type == "cuda":
            host = torch.empty(3, dtype=torch.int64, pin_memory=True, device="cpu")
            host.copy_(words, non_blocking=True)
            words, event = host, torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        size = layout.num_bytes(expected.rows)
        blank = torch.empty(size, dtype=torch.uint8, device="cpu")  # the rows themselves are not kept for a late check
        self._open.append((event, words, lambda w: layout.check([w[0], w[1] & (1 << 40) - 1, w[2]], blank, expected, what)))

    def poll(self) -> None:
        """Read the proofs that have come to the host by now."""
        while self._open and (self._open[0][0] is None or self._open[0][0].query()):  # type: ignore[no-untyped-call]
            _, words, check = self._open.pop(0)
            check(words.tolist())

    def settle(self) -> None:
        """Wait for the proofs that have not come yet and read them: at the end of a step, when nothing else would."""
        for event, _, _ in self._open:
            if event is not None:
                event.synchronize()  # type: ignore[no-untyped-call]
        self.poll()
