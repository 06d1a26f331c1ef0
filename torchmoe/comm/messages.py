"""Posting and checking of messages between ranks: what all operations of the exchange share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from torchmoe.comm.pending import Arrivals, Key, Pending
from torchmoe.comm.transport import P2P, Transport, Work
from torchmoe.comm.wire import Header, Layout, Packed
from torchmoe.errors import ConfigError, ExchangeError
from torchmoe.placement import HOST_KINDS, Placement

__all__ = ["Incoming", "Messages", "nothing"]

T_co = TypeVar("T_co", covariant=True)


class Incoming(NamedTuple):
    """One expected message: its part of the receive buffer, its header, its source."""

    part: Tensor
    header: Header
    source: int


def nothing() -> None:
    """The result of a send."""


class _Halves:
    """Sends and receives inside one group (F -> F, to the head), posted as one batch when both halves are there.

    All ranks of the group send and receive at once, in the same order of batches. Apart, each rank's send would have to end
    before its receive begins on a wire that keeps the order of a communicator.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self.ops: list[P2P] = []
        self.work: Work | None = None

    def done(self) -> bool:
        return self.work is not None and self.work.done()

    def wait(self, timeout: float) -> None:
        if self.work is None:
            raise ExchangeError(f"{self.what}: waited for before its other half was posted; verify() the schedule first")
        self.work.wait(timeout)


class Messages:
    """One rank's numbered messages.

    Args:
        placement: names of communicators and deadlines.
        transport: the wire.
        layouts: record layout of every payload kind.
        device: where payloads live.
        check: put checksums into headers.
        deferred: read proofs of arrival later, see :class:`~torchmoe.comm.pending.Arrivals`.
    """

    def __init__(
        self,
        placement: Placement,
        transport: Transport,
        *,
        layouts: Mapping[str, Layout],
        device: torch.device,
        check: bool,
        deferred: bool,
    ) -> None:
        self.placement, self.transport, self.layouts = placement, transport, layouts
        self._device, self._check = device, check
        self._index = placement.where(transport.rank).index
        self._arrivals = Arrivals(deferred=deferred)
        self._names: dict[tuple[str, int], str] = {}
        self._sequence: Counter[tuple[str, int, int]] = Counter()
        self._halves: dict[tuple[str, Key], _Halves] = {}
        self._to_self: dict[tuple[str, Key], Tensor] = {}  # a rank that is home of its own rows sends them through memory

    def _communicator(self, kind: str, layer: int) -> str:
        if (kind, layer) not in self._names:
            if not 0 <= layer < self.placement.num_layers:
                raise ConfigError(
                    f"{kind} of layer {layer}: the placement has MoE layers 0 to {self.placement.num_layers - 1}; use one of them"
                )
            self._names[kind, layer] = self.placement.communicator(kind, layer)
        return self._names[kind, layer]

    def _memory(self, kind: str) -> torch.device:
        return torch.device("cpu") if kind in HOST_KINDS else self._device

    def settle(self) -> None:
        """Read all proofs of arrival that were deferred."""
        self._arrivals.settle()

    @staticmethod
    def what(side: str, kind: str, key: Key, number: int | None = None) -> str:
        """The operation's name in errors."""
        text = "" if number is None else f" number {number}"
        return f"{side} {kind}{text} of layer {key.layer}, micro-batch {key.microbatch}"

    def header(self, kind: str, key: Key, source: int, destination: int, rows: int, *, arriving: bool = False) -> Header:
        """The next header of this communicator and pair; counted where a message is posted, so both ends agree.

        ``arriving`` tells the two ends of a message to oneself apart.
        """
        pair = (self._communicator(kind, key.layer), source, -1 if arriving else destination)
        self._sequence[pair] += 1
        return Header(kind, key.layer, key.microbatch, self._sequence[pair], rows)

    def post(
        self, kind: str, key: Key, side: str, ops: Sequence[P2P], finish: Callable[[], T_co], *, number: int | None = None
    ) -> Pending[T_co]:
        """Hand ``ops`` to the transport."""
        self._arrivals.poll()
        what = self.what(side, kind, key, number)
        work = self._start(kind, key, ops, what)
        size = sum(op.buffer.numel() for op in ops)
        return Pending(work, self.placement.deadlines.exchange, finish, what=what, num_bytes=size)

    def _start(self, kind: str, key: Key, ops: Sequence[P2P], what: str) -> Work:
        name = self._communicator(kind, key.layer)
        source, destination = self.placement.edge(kind, key.layer)
        if source != destination:
            return self.transport.post(name, ops, what)
        first = self._halves.pop((kind, key), None)
        if first is None:
            first = self._halves[kind, key] = _Halves(what)
            first.ops.extend(ops)
            return first
        first.work = self.transport.post(name, [*first.ops, *ops], f"{first.what} and {what}")
        return first

    def send(
        self,
        kind: str,
        key: Key,
        parts: Sequence[tuple[int, Sequence[Packed]]],
        finish: Callable[[], None] = nothing,
    ) -> Pending[None]:
        """Send to each (rank, fields) of ``parts``; ranks without rows are left out."""
        layout, messages = self.layouts[kind], []
        for rank, tensors in parts:
            first = tensors[0]
            rows = first.shape[0] if isinstance(first, Tensor) else first.rows
            if rows:
                header = self.header(kind, key, self.transport.rank, rank, rows)
                messages.append((rank, header, layout.pack(header, tensors, device=self._memory(kind), check=self._check)))
        return self._send(kind, key, messages, finish)

    def send_gathered(
        self,
        kind: str,
        key: Key,
        ranks: Sequence[tuple[int, int]],
        values: Sequence[Tensor],
        index_N: Tensor,
        finish: Callable[[], None] = nothing,
    ) -> Pending[None]:
        """Send to each (rank, rows) of ``ranks``, all with rows, what ``index_N`` picks: see :meth:`Layout.gather`."""
        headers = [self.header(kind, key, self.transport.rank, rank, rows) for rank, rows in ranks]
        buffers = self.layouts[kind].gather(headers, values, index_N, device=self._memory(kind), check=self._check)
        messages = [(rank, header, buffer) for (rank, _), header, buffer in zip(ranks, headers, buffers, strict=True)]
        return self._send(kind, key, messages, finish)

    def _send(
        self, kind: str, key: Key, messages: Sequence[tuple[int, Header, Tensor]], finish: Callable[[], None]
    ) -> Pending[None]:
        ops = []
        number = messages[0][1].sequence if messages else None
        # the ranks of a group begin with different receivers; else all fill the first one's link while others idle
        first = self._index % max(1, len(messages))
        for rank, _, buffer in [*messages[first:], *messages[:first]]:
            if rank == self.transport.rank:
                self._to_self[kind, key] = buffer
            else:
                ops.append(P2P("send", rank, buffer))
        return self.post(kind, key, "send", ops, finish, number=number)

    def receive(
        self, kind: str, key: Key, sources: Sequence[tuple[int, int]], finish: Callable[[Tensor, list[Tensor]], T_co]
    ) -> Pending[T_co]:
        """Receive from each (rank, rows) of ``sources`` into slices of one buffer.

        ``finish(buffer, slices)`` is called when all are checked; headers are cleared. A source without rows sends nothing and
        has an empty slice.
        """
        layout = self.layouts[kind]
        sizes = [layout.num_bytes(n) for _, n in sources]
        buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=self._memory(kind))
        slices = list(torch.split(buffer, sizes)) if sizes else []
        ops, incoming = [], []
        for (source, n), part in zip(sources, slices, strict=True):
            if n:
                if source != self.transport.rank:
                    layout.mark(part)
                    ops.append(P2P("recv", source, part))
                incoming.append(Incoming(part, self.header(kind, key, source, self.transport.rank, n, arriving=True), source))

        def done() -> T_co:
            for part, header, source in incoming:
                what = f"{self.what('recv', kind, key, header.sequence)} from rank {source}"
                if source == self.transport.rank:
                    part.copy_(self._to_self.pop((kind, key)))
                self._arrivals.check(layout, part, header, what)
            return finish(buffer, slices)

        number = incoming[0].header.sequence if incoming else None
        return self.post(kind, key, "recv", ops, done, number=number)
