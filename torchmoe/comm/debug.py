"""The debug mode of the exchange: ``TORCHMOE_DEBUG=exchange``, or ``M2NExchange(debug=True)``.

Headers carry a checksum of the rows, and a send buffer that changes between its post and its end is an error. It costs a pass
over every byte on both ends and a host synchronization per message.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from torchmoe.comm.transport import P2P, Message, Transport, Work
from torchmoe.comm.wire import checksum
from torchmoe.errors import ExchangeError

__all__ = ["CheckedTransport", "enabled"]


def enabled() -> bool:
    """Whether the comma-separated variable TORCHMOE_DEBUG names ``exchange``."""
    return "exchange" in os.environ.get("TORCHMOE_DEBUG", "").split(",")


class CheckedTransport:
    """A transport that notices when a buffer is written while it is being sent."""

    def __init__(self, transport: Transport) -> None:
        self.rank, self.world_size, self.inner = transport.rank, transport.world_size, transport

    def __repr__(self) -> str:
        return f"CheckedTransport({self.inner!r})"

    def post(self, communicator: str, ops: Sequence[P2P], what: str) -> Work:
        sums = [(op, _sum(op)) for op in ops if op.side == "send"]
        return _CheckedWork(self.inner.post(communicator, ops, what), sums, what)

    def log(self) -> list[Message]:
        return self.inner.log()

    def close(self) -> None:
        self.inner.close()


class _CheckedWork:
    def __init__(self, work: Work, sums: list[tuple[P2P, int]], what: str) -> None:
        self._work, self._sums, self._what = work, sums, what

    def done(self) -> bool:
        return self._work.done()

    def wait(self, timeout: float) -> None:
        self._work.wait(timeout)
        for op, before in self._sums:
            if _sum(op) != before:
                raise ExchangeError(
                    f"{self._what}: the {op.buffer.numel()} B for rank {op.peer} were written while they were being sent; "
                    "leave a buffer alone until its work is done"
                )
        self._sums = []


def _sum(op: P2P) -> int:
    b = op.buffer
    whole = b.numel() // 8 * 8
    return int(checksum(b[:whole])) * 8191 + int(b[whole:].sum())
