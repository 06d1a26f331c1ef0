"""Rows between ranks: one message per non-empty pair, its size known before it is posted, its trailer checked on arrival.

A message is one block per field (all rows of it, padded to 16 bytes), then a trailer of two int64 words: sequence number and
kind; rows. The trailer comes last because gloo delivers a message that is too short without a word: a receive buffer's
trailer is poisoned before it is posted, so what did not arrive cannot pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from torchmoe.comm.pending import Pending
from torchmoe.comm.transport import P2P, Transport
from torchmoe.costs.colocated import TRAILER_BYTES, row_message_bytes
from torchmoe.errors import ExchangeError

__all__ = ["KINDS", "Field", "RowWire"]

KINDS = ("counts", "rows", "d_rows", "dispatch", "d_dispatch", "combine", "d_combine")

Field = tuple[int, torch.dtype]
"""Columns and dtype of one field of a row."""


def fields_of(tensors: Sequence[Tensor]) -> list[Field]:
    """The fields of [rows, columns] tensors."""
    return [(t.shape[1], t.dtype) for t in tensors]


class RowWire:
    """Packs, posts and checks messages of rows.

    Args:
        transport: the wire.
        timeout: seconds an exchange may take.
    """

    def __init__(self, transport: Transport, timeout: float) -> None:
        self.transport, self.timeout = transport, timeout
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
        ops: list[P2P] = []
        arriving: list[tuple[int, Tensor, tuple[int, int]]] = []
        for peer, rows in receives.items():
            if rows:
                buffer = torch.empty(_bytes(rows, fields), dtype=torch.uint8, device=device)
                buffer[-TRAILER_BYTES:] = 0xFF
                ops.append(P2P("recv", peer, buffer))
                arriving.append((peer, buffer, self._words(communicator, "recv", peer, kind, rows)))
        for peer, tensors in sends.items():
            if tensors[0].shape[0]:
                words = self._words(communicator, "send", peer, kind, tensors[0].shape[0])
                ops.append(P2P("send", peer, _pack(tensors, words)))
        what = f"{kind} on rank {self.transport.rank}"

        def finish() -> dict[int, list[Tensor]]:
            self._check(arriving, communicator)
            return {peer: _unpack(buffer, words[1], fields) for peer, buffer, words in arriving}

        work = self.transport.post(communicator, ops, what)
        return Pending(work, self.timeout, finish, what=what, num_bytes=sum(op.buffer.numel() for op in ops))

    def counts(self, communicator: str, values: Mapping[int, Sequence[int]], width: int) -> dict[int, list[int]]:
        """Exchange ``width`` integers with every peer (on the host, also zeros): global rank -> what it sent here."""
        fields: list[Field] = [(width, torch.int64)]
        sends = {peer: [torch.tensor([list(v)], dtype=torch.int64)] for peer, v in values.items()}
        pending = self.post(communicator, "counts", sends, dict.fromkeys(values, 1), fields, device=torch.device("cpu"))
        return {peer: tensors[0][0].tolist() for peer, tensors in pending.wait().items()}

    def _words(self, communicator: str, side: str, peer: int, kind: str, rows: int) -> tuple[int, int]:
        self._sequence[communicator, side, peer] += 1
        return self._sequence[communicator, side, peer] << 8 | KINDS.index(kind), rows

    def _check(self, arriving: Sequence[tuple[int, Tensor, tuple[int, int]]], communicator: str) -> None:
        if not arriving:
            return
        trailers = torch.stack([buffer[-TRAILER_BYTES:] for _, buffer, _ in arriving]).view(torch.int64).tolist()
        for (peer, buffer, (word, rows)), (got_word, got_rows) in zip(arriving, trailers, strict=True):
            if (got_word, got_rows) != (word, rows):
                got = _text(got_word, got_rows) if got_word > 0 else "a message that is too short"
                raise ExchangeError(
                    f"from rank {peer} to rank {self.transport.rank} on {communicator!r}: expected {_text(word, rows)} "
                    f"({buffer.numel()} B), got {got}; the ranks run different programs, call the exchange in one order on all"
                )


def _text(word: int, rows: int) -> str:
    kind = KINDS[word & 0xFF] if word & 0xFF < len(KINDS) else "unknown"
    return f"{kind} number {word >> 8} with {rows} rows"


def _bytes(rows: int, fields: Sequence[Field]) -> int:
    return row_message_bytes(rows, [cols * dtype.itemsize for cols, dtype in fields])


def _views(buffer: Tensor, rows: int, fields: Sequence[Field]) -> list[Tensor]:
    views, at = [], 0
    for cols, dtype in fields:
        size = rows * cols * dtype.itemsize
        views.append(buffer[at : at + size].view(dtype).view(rows, cols))
        at += -(-size // 16) * 16
    return views


def _pack(tensors: Sequence[Tensor], words: tuple[int, int]) -> Tensor:
    rows, fields = tensors[0].shape[0], fields_of(tensors)
    buffer = torch.empty(_bytes(rows, fields), dtype=torch.uint8, device=tensors[0].device)
    for view, tensor in zip(_views(buffer, rows, fields), tensors, strict=True):
        view.copy_(tensor)
    buffer[-TRAILER_BYTES:].view(torch.int64).copy_(torch.tensor(words))
    return buffer


def _unpack(buffer: Tensor, rows: int, fields: Sequence[Field]) -> list[Tensor]:
    return _views(buffer, rows, fields)
