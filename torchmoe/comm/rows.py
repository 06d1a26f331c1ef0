"""Rows between ranks: one message per non-empty pair, its size known before it is posted, its trailer checked on arrival.

A message is one block per field (all rows of it, padded to 16 bytes), then a trailer of two int64 words: sequence number and
kind; rows. The trailer comes last because gloo delivers a message that is too short without a word: a receive buffer's
trailer is poisoned before it is posted, so what did not arrive cannot pass.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchmoe.comm.pending import Pending
from torchmoe.comm.transport import P2P, SwapTransport, Transport, Work
from torchmoe.comm.wire import read_words, write_words
from torchmoe.costs.colocated import TRAILER_BYTES, row_message_bytes
from torchmoe.errors import ExchangeError

__all__ = ["KINDS", "Field", "RowWire", "fields_of"]

KINDS = ("counts", "rows", "d_rows", "dispatch", "d_dispatch", "combine", "d_combine")
_CODES = {kind: i for i, kind in enumerate(KINDS)}

Field = tuple[int, torch.dtype]
"""Columns and dtype of one field of a row."""


def fields_of(tensors: Sequence[Tensor]) -> list[Field]:
    """The fields of [rows, columns] tensors."""
    return [(t.shape[1], t.dtype) for t in tensors]


class _Arrival(NamedTuple):
    """A message that must come: the buffer of it, and what its trailer must say."""

    peer: int
    buffer: Tensor
    word: int
    rows: int


class RowWire:
    """Packs, posts and checks messages of rows.

    Args:
        transport: the wire.
        timeout: seconds an exchange may take.
        collective: use the transport's ``swap``; then every rank of a communicator makes every call, also without rows.
    """

    def __init__(self, transport: Transport, timeout: float, *, collective: bool = False) -> None:
        self.transport, self.timeout = transport, timeout
        self._swap = transport if collective and isinstance(transport, SwapTransport) else None
        self._sequence: Counter[tuple[str, str, int]] = Counter()

    def post(
        self,
        communicator: str,
        kind: str,
        sends: Mapping[int, Sequence[Tensor]],
        receives: Mapping[int, int],
        fields: Sequence[Field],
        *,
        device: torch.device,
    ) -> Pending[dict[int, list[Tensor]]]:
        """Start one message to and from each peer, both ends at once.

        Args:
            communicator: a communicator with all these peers.
            kind: what the rows are, one of ``KINDS``.
            sends: global rank -> its fields, [rows, columns] each; empty ones are not sent.
            receives: global rank -> rows that come from it.
            fields: of the rows that come.
            device: where they shall be.

        Returns:
            A handle whose ``wait`` gives global rank -> fields, for the peers that sent rows.
        """
        widths = [cols * dtype.itemsize for cols, dtype in fields]
        come = {peer: row_message_bytes(rows, widths) for peer, rows in receives.items() if rows}
        go = {
            peer: row_message_bytes(tensors[0].shape[0], [t.shape[1] * t.dtype.itemsize for t in tensors])
            for peer, tensors in sends.items()
            if tensors[0].shape[0]
        }
        recv = torch.empty(sum(come.values()), dtype=torch.uint8, device=device)
        send = torch.empty(sum(go.values()), dtype=torch.uint8, device=device)
        into, out = _cut(recv, come), _cut(send, go)
        arriving = [
            _Arrival(peer, part, self._word(communicator, "recv", peer, kind), receives[peer]) for peer, part in into.items()
        ]
        for _, part, _, _ in arriving:
            _poison(part)
        for peer, part in out.items():
            tensors = sends[peer]
            _pack(part, tensors, self._word(communicator, "send", peer, kind))
        what = f"{kind} on rank {self.transport.rank}"
        work = self._start(communicator, send, out, recv, into, what)

        def finish() -> dict[int, list[Tensor]]:
            for arrival in arriving:
                self._check(arrival, communicator)
            return {a.peer: _views(a.buffer, a.rows, fields) for a in arriving}

        return Pending(work, self.timeout, finish, what=what, num_bytes=send.numel() + recv.numel())

    def _start(
        self, communicator: str, send: Tensor, out: Mapping[int, Tensor], recv: Tensor, into: Mapping[int, Tensor], what: str
    ) -> Work:
        if self._swap is None:
            ops = [P2P("recv", peer, part) for peer, part in into.items()]
            ops += [P2P("send", peer, part) for peer, part in out.items()]
            return self.transport.post(communicator, ops, what)
        ranks = self._swap.members(communicator)
        sent = [out[r].numel() if r in out else 0 for r in ranks]
        got = [into[r].numel() if r in into else 0 for r in ranks]
        return self._swap.swap(communicator, send, sent, recv, got, what=what)

    def counts(self, communicator: str, values: Mapping[int, Sequence[int]], width: int, form: str) -> dict[int, list[int]]:
        """Exchange ``width`` integers with every peer (on the host, also zeros): global rank -> what it sent here.

        Args:
            form: what the rows that follow are like. Sizes of messages follow from it, so it must be the same on both ends.

        Raises:
            ExchangeError: a peer's rows are of another form; nothing of the rows has been sent then.
        """
        fields: list[Field] = [(width + 1, torch.int64)]
        mine = zlib.crc32(form.encode())
        rows = torch.tensor([[mine, *v] for v in values.values()], dtype=torch.int64, device="cpu")
        sends = {peer: [rows[i : i + 1]] for i, peer in enumerate(values)}
        pending = self.post(communicator, "counts", sends, dict.fromkeys(values, 1), fields, device=torch.device("cpu"))
        got = {peer: tensors[0][0].tolist() for peer, tensors in pending.wait().items()}
        for peer, (theirs, *_) in got.items():
            if theirs != mine:
                raise ExchangeError(
                    f"rank {peer} announces other rows on {communicator!r} than rank {self.transport.rank}, which has {form}; "
                    "call the same operation with the same widths, dtypes and expert owners on all ranks"
                )
        return {peer: numbers for peer, (_, *numbers) in got.items()}

    def _word(self, communicator: str, side: str, peer: int, kind: str) -> int:
        key = communicator, side, peer
        self._sequence[key] += 1
        return self._sequence[key] << 8 | _CODES[kind]

    def _check(self, arrival: _Arrival, communicator: str) -> None:
        word, rows = _trailer(arrival.buffer)
        if (word, rows) != (arrival.word, arrival.rows):
            got = _text(word, rows) if word > 0 else "a message that is too short"
            raise ExchangeError(
                f"from rank {arrival.peer} to rank {self.transport.rank} on {communicator!r}: expected "
                f"{_text(arrival.word, arrival.rows)} ({arrival.buffer.numel()} B), got {got}; "
                "the ranks run different programs, call the exchange in one order on all"
            )


def _text(word: int, rows: int) -> str:
    kind = KINDS[word & 0xFF] if word & 0xFF < len(KINDS) else "unknown"
    return f"{kind} number {word >> 8} with {rows} rows"


def _cut(buffer: Tensor, sizes: Mapping[int, int]) -> dict[int, Tensor]:
    """Peers in ascending order, the order of a communicator's ranks, so that parts lie as ``swap`` wants them."""
    out, at = {}, 0
    for peer in sorted(sizes):
        out[peer] = buffer[at : at + sizes[peer]]
        at += sizes[peer]
    return out


def _views(buffer: Tensor, rows: int, fields: Sequence[Field]) -> list[Tensor]:
    views, at = [], 0
    for cols, dtype in fields:
        size = rows * cols * dtype.itemsize
        views.append(buffer[at : at + size].view(dtype).view(rows, cols))
        at += -(-size // 16) * 16
    return views


def _pack(buffer: Tensor, tensors: Sequence[Tensor], word: int) -> None:
    rows = tensors[0].shape[0]
    for view, tensor in zip(_views(buffer, rows, fields_of(tensors)), tensors, strict=True):
        view.copy_(tensor)
    write_words(buffer, buffer.numel() - TRAILER_BYTES, (word, rows))


def _poison(buffer: Tensor) -> None:
    write_words(buffer, buffer.numel() - TRAILER_BYTES, (-1, -1))


def _trailer(buffer: Tensor) -> tuple[int, int]:
    word, rows = read_words(buffer, buffer.numel() - TRAILER_BYTES, 2)
    return word, rows
