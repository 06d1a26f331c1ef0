"""The wire format: records of fixed stride, record 0 of a payload message is the header; counts are int64 words.

A record holds one row's fields (e.g. ``x | gates | ids``), each aligned to 8 bytes, padded to a multiple of 16 so that any
dtype can view the buffer without a copy. The header is checked on arrival and then cleared: left in place its bits may be
NaNs of the payload's dtype, and it stays among the rows.

gloo delivers a message that is too short without a word and leaves the tail of the buffer as it was. So the receiver marks the
last word of a buffer before it posts it: a mark that is still there was never written.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from torchmoe.costs.exchange import message_bytes, record_bytes
from torchmoe.errors import ConfigError, ExchangeError

__all__ = [
    "COUNTS_HEADER",
    "KINDS",
    "Header",
    "Layout",
    "Packed",
    "Spans",
    "checksum",
    "pack_counts",
    "read_words",
    "unpack_counts",
    "write_words",
]

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
        if not (0 <= self.layer < 1 << 15 and 0 <= self.microbatch < 1 << 15 and self.rows < 1 << 32):
            raise ConfigError(
                f"layer {self.layer} and micro-batch {self.microbatch} must be from 0 to 32767 and {self.rows} rows below 2**32 "
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


def write_words(buffer: Tensor, at: int, words: Sequence[int]) -> None:
    """Put int64 ``words`` at byte ``at`` of a uint8 buffer."""
    if buffer.device.type == "cpu":  # a tensor operation for 16 bytes costs as much as the rest of a small message
        ctypes.memmove(buffer.data_ptr() + at, struct.pack(f"={len(words)}q", *words), 8 * len(words))
    else:  # scalars travel with the kernel; a copy from the host would wait for all that the stream has to do before
        view = buffer[at : at + 8 * len(words)].view(torch.int64)
        for i, word in enumerate(words):
            view[i].fill_(word)


def read_words(buffer: Tensor, at: int, count: int) -> tuple[int, ...]:
    """``count`` int64 words at byte ``at`` of a uint8 buffer; waits for a device."""
    if buffer.device.type == "cpu":
        return struct.unpack(f"={count}q", ctypes.string_at(buffer.data_ptr() + at, 8 * count))
    return tuple(buffer[at : at + 8 * count].view(torch.int64).tolist())


def checksum(buffer: Tensor) -> Tensor:
    """Checksum of bytes (a multiple of 8), as an int64 scalar on their device; a swap of two words changes it."""
    words = buffer.view(torch.int64)
    weights = torch.arange(1, words.numel() + 1, device=buffer.device) * 2 + 1  # odd, so that no bit is lost modulo 2**64
    return (words * weights).sum() % _CHECKED + 1


class Spans(NamedTuple):
    """Rows ``values[start:stop]`` of every span, one below the other, that are to be packed, not copied twice: [T, columns]."""

    values: Tensor
    spans: Sequence[tuple[int, int]]

    @property
    def rows(self) -> int:
        return sum(hi - lo for lo, hi in self.spans)

    def put(self, out: Tensor) -> None:
        at = 0
        for lo, hi in self.spans:
            out[at : at + hi - lo].copy_(self.values[lo:hi])
            at += hi - lo


Packed = Tensor | Spans
"""What one field of a message is made of."""


@dataclass(frozen=True)
class Layout:
    """Fields of one record: (columns, dtype) each."""

    fields: tuple[tuple[int, torch.dtype], ...]

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Byte offset of each field."""
        at, out = 0, []
        for cols, dtype in self.fields:
            out.append(at)
            at += -(-cols * dtype.itemsize // 8) * 8
        return tuple(out)

    @cached_property
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

    def pack(self, header: Header, tensors: Sequence[Packed], *, device: torch.device, check: bool = False) -> Tensor:
        """A message: header record, then ``header.rows`` rows of the given [rows, columns] tensors, or picked out of larger ones.

        Args:
            check: put a checksum of the rows into the header.
        """
        buffer = torch.empty(self.num_bytes(header.rows), dtype=torch.uint8, device=device)
        self._clear_padding(buffer)
        for view, tensor in zip(self.views(buffer), tensors, strict=True):
            if isinstance(tensor, Tensor):
                view[1:].copy_(tensor)
            else:
                tensor.put(view[1:])
        self._stamp(buffer, header, check)
        return buffer

    def gather(
        self, headers: Sequence[Header], values: Sequence[Tensor], index_N: Tensor, *, device: torch.device, check: bool = False
    ) -> list[Tensor]:
        """The messages of all ``headers`` in one piece of memory, one pass per field whatever their number.

        Args:
            values: per field, [T, columns].
            index_N: the row of ``values`` in every record, message by message, with any row in a header's place.
            check: see :meth:`pack`.
        """
        sizes = [self.num_bytes(h.rows) for h in headers]
        buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        self._clear_padding(buffer)
        for view, value in zip(self.views(buffer), values, strict=True):
            if value.dtype == view.dtype:
                torch.index_select(value, 0, index_N, out=view)
            else:
                view.copy_(value[index_N])
        messages = list(torch.split(buffer, sizes)) if sizes else []
        for message, header in zip(messages, headers, strict=True):
            self._stamp(message, header, check)
        return messages

    def _stamp(self, buffer: Tensor, header: Header, check: bool) -> None:
        self._clear_header(buffer)
        value = int(checksum(buffer[self.stride :])) if check else 0
        write_words(buffer, 0, header.words(value))

    def _clear_padding(self, buffer: Tensor) -> None:
        """What stands between fields is sent, too: not what was in this memory before."""
        for lo, hi in self._gaps:
            buffer.view(-1, self.stride)[:, lo:hi].zero_()

    @cached_property
    def _gaps(self) -> list[tuple[int, int]]:
        """Bytes of a record that belong to no field."""
        ends = [at + cols * dtype.itemsize for at, (cols, dtype) in zip(self.offsets, self.fields, strict=True)]
        return [(end, nxt) for end, nxt in zip(ends, [*self.offsets[1:], self.stride], strict=True) if end < nxt]

    def mark(self, buffer: Tensor) -> None:
        """Prepare a receive buffer: see the module."""
        write_words(buffer, buffer.numel() - 8, (_MARK,))

    def proof(self, buffer: Tensor) -> Sequence[int]:
        """The three words that :func:`check` needs, read from a received buffer; its header is then cleared."""
        words = *read_words(buffer, 0, 2), *read_words(buffer, buffer.numel() - 8, 1)
        self._clear_header(buffer)
        return words

    def proof_on_device(self, buffer: Tensor) -> Tensor:
        """The same as a tensor on the buffer's device, which the host does not wait for."""
        words = torch.cat([buffer[:16], buffer[-8:]]).view(torch.int64)
        self._clear_header(buffer)
        return words

    def _clear_header(self, buffer: Tensor) -> None:
        if buffer.device.type == "cpu":
            ctypes.memset(buffer.data_ptr(), 0, self.stride)
        else:
            buffer[: self.stride].zero_()

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
    words_NW = torch.empty(n, COUNTS_HEADER + counts_NC2[0].numel(), dtype=torch.int64, device="cpu")
    words_NW[:, COUNTS_HEADER:] = counts_NC2.reshape(n, -1)
    heads = [(h.sequence, h.layer, h.microbatch, 0, plan, h.rows) for h in headers]
    words_NW[:, :COUNTS_HEADER] = torch.tensor(heads, device="cpu")
    words_NW[:, 3] = _counts_checksum(words_NW)
    return list(words_NW.view(torch.uint8).unbind())


def unpack_counts(buffer: Tensor, headers: Sequence[Header], sources: Sequence[int], what: str, *, plan: int) -> Tensor:
    """(rows of the dispatch that follows, counts) of the counts messages of all sources, one after the other in ``buffer``:
    [sources, COUNTS_HEADER + 2 * next ranks] words.

    Raises:
        ExchangeError: wrong checksum, negative counts, another plan, or another message than the one expected.
    """
    words_SW = buffer.view(torch.int64).view(len(headers), -1)
    got = torch.cat([words_SW[:, :COUNTS_HEADER], _counts_checksum(words_SW)[:, None]], 1).tolist()
    negative = bool((words_SW[:, COUNTS_HEADER - 1 :] < 0).any())
    for s, (h, (sequence, layer, microbatch, value, other, _, found)) in enumerate(zip(headers, got, strict=True)):
        if (sequence, layer, microbatch, value, other) != (h.sequence, h.layer, h.microbatch, found, plan) or negative:
            _explain_counts(words_SW[s], h, f"{what} from rank {sources[s]}", plan)
    return words_SW


def _explain_counts(words: Tensor, expected: Header, what: str, plan: int) -> None:
    """Raise what is wrong with one message, if anything is."""
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
    if bool((words[COUNTS_HEADER - 1 :] < 0).any()):
        raise ExchangeError(
            f"{what}: {name} announces negative rows {words[COUNTS_HEADER - 1 :].tolist()}; the sender miscounted"
        )


def _counts_checksum(words_NW: Tensor) -> Tensor:
    return (words_NW * _weights(words_NW.shape[1])).sum(1) ^ 0x5EED


@cache
def _weights(width: int) -> Tensor:
    """Odd, so that no bit is lost modulo 2**64; the checksum's own word does not count."""
    weights = torch.arange(1, width + 1, dtype=torch.int64, device="cpu") * 2 + 1
    weights[3] = 0
    return weights
