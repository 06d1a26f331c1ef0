"""The wire format: records of fixed stride, record 0 of a payload message is the header; counts are int64 words.

A record holds one row's fields (e.g. ``x | gates | ids``), each aligned to 8 bytes, padded to a multiple of 16 so that any
dtype can view the buffer without a copy. The header is checked on arrival and then cleared: left in place its bits may be
NaNs of the payload's dtype, and it stays among the rows.

gloo delivers a message that is too short without a word and leaves the tail of the buffer as it was. So the receiver marks the
last word of a buffer before it posts it: a mark that is still there was never written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torchmoe.costs.exchange import message_bytes, record_bytes
from torchmoe.errors import ConfigError, ExchangeError

__all__ = ["COUNTS_HEADER", "KINDS", "Header", "Layout", "checksum", "pack_counts", "unpack_counts"]

KINDS = ("counts", "ids", "dispatch", "combine", "residual", "d_dispatch", "d_combine", "d_residual", "labels")
COUNTS_HEADER = 6  # int64 words: sequence number, layer, micro-batch, checksum, plan, rows of the dispatch that follows
_CHECKED = (1 << 23) - 15  # checksums are below this prime and never 0, which says "not computed"
_MARK = 0x70E6_0D0F_ACE5_5A17


class Header(NamedTuple):
    """Who a message is: its number on its (communicator, source, destination), and what it carries."""

    kind: str
    layer: int
    microbatch: int
    sequence: int
    rows: int

    def words(self, check: int = 0) -> tuple[int, int]:
        """Two int64 words: sequence 32, layer 16, micro-batch 15 bits; rows 32, kind 8, checksum 23 bits."""
        if self.layer >= 1 << 15 or self.microbatch >= 1 << 15 or self.rows >= 1 << 32:
            raise ConfigError(
                f"layer {self.layer} and micro-batch {self.microbatch} must be below 32768 and {self.rows} rows below 2**32 "
                "to fit in a message header"
            )
        a = (self.sequence & 0xFFFFFFFF) | self.layer << 32 | self.microbatch << 48
        return a, self.rows | KINDS.index(self.kind) << 32 | check << 40

    @classmethod
    def of_words(cls, a: int, b: int) -> tuple[Header, int]:
        """(header, checksum)."""
        kind = b >> 32 & 0xFF
        name = KINDS[kind] if kind < len(KINDS) else f"unknown kind {kind}"
        return cls(name, a >> 32 & 0xFFFF, a >> 48 & 0xFFFF, a & 0xFFFFFFFF, b & 0xFFFFFFFF), b >> 40 & 0x7FFFFF

    def __str__(self) -> str:
        return f"{self.kind} number {self.sequence} of layer {self.layer}, micro-batch {self.microbatch} with {self.rows} rows"


def checksum(buffer: Tensor) -> Tensor:
    """Checksum of bytes (a multiple of 8), as an int64 scalar on their device; a swap of two words changes it."""
    words = buffer.view(torch.int64)
    weights = torch.arange(1, words.numel() + 1, device=buffer.device) * 2 + 1  # odd, so that no bit is lost modulo 2**64
    return (words * weights).sum() % _CHECKED + 1


class Gather(NamedTuple):
    """Rows ``values[rows_R]`` that are to be packed, not copied twice: [T, columns] and the rows' int64 indices."""

    values: Tensor
    rows_R: Tensor

    @property
    def rows(self) -> int:
        return int(self.rows_R.shape[0])


@dataclass(frozen=True)
class Layout:
    """Fields of one record: (columns, dtype) each."""

    fields: tuple[tuple[int, torch.dtype], ...]

    @property
    def offsets(self) -> tuple[int, ...]:
        """Byte offset of each field."""
        at, out = 0, []
        for cols, dtype in self.fields:
            out.append(at)
            at += -(-cols * dtype.itemsize // 8) * 8
        return tuple(out)

    @property
    def stride(self) -> int:
        return record_bytes([cols * dtype.itemsize for cols, dtype in self.fields])

    def num_bytes(self, rows: int) -> int:
        """Bytes of a message of ``rows`` rows: nothing is sent for 0 rows."""
        return message_bytes(rows, self.stride)

    def views(self, buffer: Tensor) -> list[Tensor]:
        """The fields of every record of a uint8 buffer (header included) as strided [records, columns] tensors, no copy."""
        records = buffer.view(-1, self.stride)
        return [
            records.view(dtype)[:, at // dtype.itemsize : at // dtype.itemsize + cols]
            for at, (cols, dtype) in zip(self.offsets, self.fields, strict=True)
        ]

    def pack(self, header: Header, tensors: Sequence[Tensor | Gather], *, device: torch.device, check: bool = False) -> Tensor:
        """A message: header record, then ``header.rows`` rows of the given [rows, columns] tensors, or gathered.

        Args:
            check: put a checksum of the rows into the header.
        """
        buffer = torch.empty(self.num_bytes(header.rows), dtype=torch.uint8, device=device)
        buffer[: self.stride].zero_()
        self._clear_padding(buffer)
        for view, tensor in zip(self.views(buffer), tensors, strict=True):
            if isinstance(tensor, Gather) and tensor.values.dtype == view.dtype:
                torch.index_select(tensor.values, 0, tensor.rows_R, out=view[1:])
            else:
                view[1:].copy_(tensor.values[tensor.rows_R] if isinstance(tensor, Gather) else tensor)
        value = int(checksum(buffer[self.stride :])) if check else 0
        buffer[:16].view(torch.int64).copy_(torch.tensor(header.words(value)))
        return buffer

    def _clear_padding(self, buffer: Tensor) -> None:
        """What stands between fields is sent, too: not what was in this memory before."""
        records = buffer.view(-1, self.stride)
        ends = [*self.offsets[1:], self.stride]
        for at, (cols, dtype), end in zip(self.offsets, self.fields, ends, strict=True):
            if at + cols * dtype.itemsize < end:
                records[:, at + cols * dtype.itemsize : end].zero_()

    def mark(self, buffer: Tensor) -> None:
        """Prepare a receive buffer: see the module."""
        buffer[-8:].view(torch.int64).fill_(_MARK)

    def proof(self, buffer: Tensor) -> Tensor:
        """The three words that :func:`check` needs, copied out of a received buffer; its header is then cleared."""
        words = torch.cat([buffer[:16], buffer[-8:]]).view(torch.int64)
        buffer[: self.stride].zero_()
        return words

    def check(self, words: Sequence[int], buffer: Tensor, expected: Header, what: str) -> None:
        """Compare what :meth:`proof` copied with the message that must come now, and the rows with the header's checksum.

        Raises:
            ExchangeError: another message came, a shorter one, or its rows were changed on the way.
        """
        size = buffer.numel()
        got, value = Header.of_words(words[0], words[1])
        if got != expected:
            raise ExchangeError(
                f"{what}: expected {expected} ({size} B), got {got} ({self.num_bytes(got.rows)} B); "
                "sender and receiver run different plans or their messages changed places"
            )
        if words[2] == _MARK:
            raise ExchangeError(
                f"{what}: {expected} must have {size} B but its end never came; the sender announced more bytes than it sent"
            )
        if value and value != int(checksum(buffer[self.stride :])):
            raise ExchangeError(f"{what}: the {size} B of {expected} do not have the sender's checksum; they were corrupted")


def pack_counts(counts_NC2: Tensor, headers: Sequence[Header], *, plan: int) -> list[Tensor]:
    """The counts messages of all F ranks, as bytes of int64 words: header, then (rows, slots) per next rank.

    Args:
        plan: a number that both ends must share, made of all settings of the exchange.
    """
    n = len(headers)
    words_NW = torch.zeros(n, COUNTS_HEADER + counts_NC2[0].numel(), dtype=torch.int64)
    words_NW[:, :COUNTS_HEADER] = torch.tensor([(h.sequence, h.layer, h.microbatch, 0, plan, h.rows) for h in headers])
    words_NW[:, COUNTS_HEADER:] = counts_NC2.reshape(n, -1)
    words_NW[:, 3] = _counts_checksum(words_NW)
    return list(words_NW.view(torch.uint8).unbind())


def unpack_counts(buffer: Tensor, headers: Sequence[Header], sources: Sequence[int], what: str, *, plan: int) -> Tensor:
    """(rows of the dispatch that follows, counts) of the counts messages of all sources, one after the other in ``buffer``:
    [sources, COUNTS_HEADER + 2 * next ranks] words.

    Raises:
        ExchangeError: wrong checksum, negative counts, another plan, or another message than the one expected.
    """
    words_SW = buffer.view(torch.int64).view(len(headers), -1)
    want = torch.tensor([(h.sequence, h.layer, h.microbatch, plan) for h in headers])
    good = (words_SW[:, [0, 1, 2, 4]] == want).all(1) & (words_SW[:, 3] == _counts_checksum(words_SW))
    good &= (words_SW[:, COUNTS_HEADER - 1 :] >= 0).all(1)
    if not bool(good.all()):
        s = int((~good).int().argmax())
        _explain_counts(words_SW[s], headers[s], f"{what} from rank {sources[s]}", plan)
    return words_SW


def _explain_counts(words: Tensor, expected: Header, what: str, plan: int) -> None:
    sequence, layer, microbatch, value, other, _ = words[:COUNTS_HEADER].tolist()
    size, name = words.numel() * 8, str(expected).split(" with ")[0]
    if value != int(_counts_checksum(words[None])):
        raise ExchangeError(f"{what}: the {size} B of {name} do not have their checksum; they were corrupted or are too few")
    got = Header("counts", layer, microbatch, sequence, expected.rows)
    if got != expected:
        raise ExchangeError(
            f"{what}: expected {name} ({size} B), got {str(got).split(' with ')[0]}; "
            "sender and receiver run different plans or their messages changed places"
        )
    if other != plan:
        raise ExchangeError(
            f"{what}: {name} ({size} B) comes from an exchange with other settings (plan {other:x}, here {plan:x}); "
            "call exchange.handshake() at start-up to see which one differs"
        )
    raise ExchangeError(f"{what}: {name} announces negative rows {words[COUNTS_HEADER - 1 :].tolist()}; the sender miscounted")


def _counts_checksum(words_NW: Tensor) -> Tensor:
    weights = torch.arange(1, words_NW.shape[1] + 1, dtype=torch.int64) * 2 + 1  # odd: no bit is lost modulo 2**64
    weights[3] = 0
    return (words_NW * weights).sum(1) ^ 0x5EED
