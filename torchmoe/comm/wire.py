"""The wire format of payload messages: records of fixed stride, record 0 is the header.

A record holds one row's fields (e.g. ``x | gates | ids``), each aligned to 8 bytes, padded to a multiple of 16 so that any
dtype can view the buffer without a copy. The header is checked on arrival and then cleared: left in place its bits may be
NaNs of the payload's dtype, and it stays among the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torchmoe.errors import ConfigError, ExchangeError

__all__ = ["COUNTS_HEADER", "KINDS", "Header", "Layout", "pack_counts", "unpack_counts"]

KINDS = ("counts", "ids", "dispatch", "combine", "residual", "d_dispatch", "d_combine", "d_residual")
COUNTS_HEADER = 4  # int64 words: sequence number, layer, micro-batch, checksum


class Header(NamedTuple):
    """Who a message is: its number on its (communicator, source, destination), and what it carries."""

    kind: str
    layer: int
    microbatch: int
    sequence: int
    rows: int

    def words(self) -> tuple[int, int]:
        """Two int64 words."""
        if self.layer >= 1 << 15 or self.microbatch >= 1 << 15:
            raise ConfigError(
                f"layer {self.layer} and micro-batch {self.microbatch} must be below 32768 to fit in a message header"
            )
        a = self.sequence | self.layer << 32 | self.microbatch << 48
        return a, self.rows | KINDS.index(self.kind) << 40

    @classmethod
    def of_words(cls, a: int, b: int) -> Header:
        kind = b >> 40 & 0xFF
        name = KINDS[kind] if kind < len(KINDS) else f"unknown kind {kind}"
        return cls(name, a >> 32 & 0xFFFF, a >> 48 & 0xFFFF, a & 0xFFFFFFFF, b & (1 << 40) - 1)

    def __str__(self) -> str:
        return f"{self.kind} number {self.sequence} of layer {self.layer}, micro-batch {self.microbatch} with {self.rows} rows"


@dataclass(frozen=True)
class Layout:
    """Fields of one record: (columns, dtype) each."""

    fields: tuple[tuple[int, torch.dtype], ...]

    @property
    def offsets(self) -> tuple[int, ...]:
        """Byte offset of each field, and the stride as the last entry."""
        at, out = 0, []
        for cols, dtype in self.fields:
            out.append(at)
            at += -(-cols * dtype.itemsize // 8) * 8
        return (*out, max(16, -(-at // 16) * 16))

    @property
    def stride(self) -> int:
        return self.offsets[-1]

    def num_bytes(self, rows: int) -> int:
        """Bytes of a message of ``rows`` rows: nothing is sent for 0 rows."""
        return (rows + 1) * self.stride if rows else 0

    def views(self, buffer: Tensor) -> list[Tensor]:
        """The fields of every record of a uint8 buffer (header included) as strided [records, columns] tensors, no copy."""
        records = buffer.view(-1, self.stride)
        return [
            records.view(dtype)[:, at // dtype.itemsize : at // dtype.itemsize + cols]
            for at, (cols, dtype) in zip(self.offsets[:-1], self.fields, strict=True)
        ]

    def pack(self, header: Header, tensors: Sequence[Tensor], *, device: torch.device) -> Tensor:
        """A message: header record, then ``header.rows`` rows of the given [rows, columns] tensors."""
        buffer = torch.zeros(self.num_bytes(header.rows), dtype=torch.uint8, device=device)
        buffer[:16].view(torch.int64).copy_(torch.tensor(header.words()))
        for view, tensor in zip(self.views(buffer), tensors, strict=True):
            view[1:].copy_(tensor)
        return buffer

    def check(self, buffer: Tensor, expected: Header, source: int) -> None:
        """Compare the header with what must come now, then clear it.

        Raises:
            ExchangeError: another message came, or one of another size.
        """
        record = buffer[: self.stride]
        got = Header.of_words(*record[:16].view(torch.int64).tolist())
        if got != expected:
            raise ExchangeError(f"from rank {source}: expected {expected}, got {got}; sender and receiver run different plans")
        record.zero_()


def pack_counts(counts_C2: Tensor, header: Header) -> Tensor:
    """The counts message of one F rank: [sequence, layer, micro-batch, checksum, counts...] as int64 bytes."""
    words = torch.empty(COUNTS_HEADER + counts_C2.numel(), dtype=torch.int64)
    words[:3] = torch.tensor([header.sequence, header.layer, header.microbatch])
    words[COUNTS_HEADER:] = counts_C2.reshape(-1)
    words[3] = _checksum(words)
    return words.view(torch.uint8)


def unpack_counts(buffer: Tensor, expected: Header, source: int) -> Tensor:
    """Counts [next ranks, 2] of a counts message.

    Raises:
        ExchangeError: wrong checksum, negative counts, or another message than the one expected.
    """
    words = buffer.view(torch.int64)
    if int(words[3]) != _checksum(words):
        raise ExchangeError(f"from rank {source}: the counts of {expected} are corrupted (checksum {int(words[3])})")
    got = Header("counts", int(words[1]), int(words[2]), int(words[0]), expected.rows)
    if got != expected or bool((words[COUNTS_HEADER:] < 0).any()):
        raise ExchangeError(f"from rank {source}: expected {expected}, got {got}; sender and receiver run different plans")
    return words[COUNTS_HEADER:].view(-1, 2)


def _checksum(words: Tensor) -> int:
    weights = 2 * torch.arange(words.numel(), dtype=torch.int64) + 1  # odd: no bit of a word can vanish modulo 2**64
    weights[3] = 0
    return int((words * weights).sum()) ^ 0x5EED
