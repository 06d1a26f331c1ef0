"""Blocks of an expert's rows: the unit of work of the reference kernels, and the few steps they are made of.

A block has at most ``BLOCK_ROWS`` rows, so its products stay in cache and scratch memory is bounded. Every step computes in the
accumulation dtype; what is stored in a narrower dtype is rounded once and read back rounded.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from torchmoe.costs.experts import BLOCK_ROWS

__all__ = [
    "ALIGNMENT",
    "BLOCK_ROWS",
    "GradSink",
    "Scratch",
    "accumulation_dtype",
    "blocks",
    "cut",
    "project",
    "segments",
    "store",
]

ALIGNMENT = 64
"""Bytes; what torch gives every allocation on a CPU."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 stays fp64, everything narrower is summed in fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def segments(offsets_E1: Tensor) -> Iterator[tuple[int, slice]]:
    """(expert, its rows), empty experts included."""
    bounds = offsets_E1.tolist()
    for e in range(len(bounds) - 1):
        yield e, slice(bounds[e], bounds[e + 1])


def cut(rows: slice) -> Iterator[slice]:
    """Blocks of a range of rows."""
    for start in range(rows.start, rows.stop, BLOCK_ROWS):
        yield slice(start, min(start + BLOCK_ROWS, rows.stop))


def blocks(offsets_E1: Tensor) -> Iterator[tuple[int, slice]]:
    """(expert, block of its rows) for every block of every expert."""
    for e, rows in segments(offsets_E1):
        for block in cut(rows):
            yield e, block


class Scratch:
    """Buffers by name in the accumulation dtype, reused from block to block; they die with the call that made them."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.storage_dtype, self.dtype = device, dtype, accumulation_dtype(dtype)
        self._buffers: dict[tuple[str, int], Tensor] = {}

    def take(self, name: str, rows: int, columns: int) -> Tensor:
        """A contiguous [rows, columns] buffer with undefined contents."""
        buffer = self._buffers.get((name, columns))
        if buffer is None or buffer.size(0) < rows:
            buffer = torch.empty(rows, columns, dtype=self.dtype, device=self.device)
            self._buffers[name, columns] = buffer
        return buffer[:rows]

    def output(self, name: str, target: Tensor | None, rows: int, columns: int) -> Tensor:
        """``target`` itself where it has the accumulation dtype and is aligned, else a buffer to be stored into it.

        The last bits of a BLAS product depend on the alignment of its operands. Every block is therefore aligned like a buffer,
        whatever rows the expert starts at, and all save modes and both forms of the backward compute the same bits.
        """
        fits = target is not None and target.dtype == self.dtype and target.data_ptr() % ALIGNMENT == 0
        return target if fits and target is not None else self.take(name, rows, columns)

    def rows(self, name: str, values: Tensor) -> Tensor:
        """Rows of a product [P, C] (or of some of its columns) as an aligned block in the accumulation dtype, same row stride."""
        ld = values.stride(0)
        column = values.storage_offset() % ld if ld else 0
        base = values.data_ptr() - column * values.element_size()
        if values.dtype == self.dtype and base % ALIGNMENT == 0:
            return values
        return self.take(name, values.size(0), ld)[:, column : column + values.size(1)].copy_(values)

    def gather(self, name: str, values: Tensor, indices_N: Tensor) -> Tensor:
        """Rows of ``values`` in the accumulation dtype."""
        if values.dtype == self.dtype:
            return torch.index_select(values, 0, indices_N, out=self.take(name, indices_N.numel(), values.size(1)))
        return self.take(name, indices_N.numel(), values.size(1)).copy_(values.index_select(0, indices_N))

    def wide(self, name: str, values: Tensor) -> Tensor:
        """``values`` in the accumulation dtype."""
        return values if values.dtype == self.dtype else self.take(name, values.size(0), values.size(1)).copy_(values)

    def round_(self, values: Tensor) -> Tensor:
        """Round in place to what the storage dtype can hold."""
        return values if self.storage_dtype == self.dtype else values.copy_(values.to(self.storage_dtype))


def store(target: Tensor, values: Tensor) -> None:
    """Copy, unless ``values`` was computed in place."""
    if target.data_ptr() != values.data_ptr() or target.dtype != values.dtype:
        target.copy_(values)


def project(x_NI: Tensor, w_OI: Tensor, b_O: Tensor | None, out_NO: Tensor) -> None:
    """out = x w^T + b in the accumulation dtype."""
    if b_O is None:
        torch.mm(x_NI, w_OI.t(), out=out_NO)
    else:
        torch.addmm(b_O.to(x_NI.dtype), x_NI, w_OI.t(), out=out_NO)


class GradSink:
    """Where one weight's or bias's gradient is summed, expert by expert, and rounded once to ``out``'s dtype.

    Args:
        out: [E, ...], may be a strided view.
        accumulate: add to what is there; else overwrite, with exact zeros for experts without rows.
    """

    def __init__(self, out: Tensor, accumulate: bool, scratch: Scratch, name: str) -> None:
        self.out, self.accumulate, self.scratch, self.name = out, accumulate, scratch, name
        self._target = out
        self._fresh = False

    def begin(self, e: int, rows: slice) -> bool:
        """Start expert e; whether it has rows."""
        if rows.stop == rows.start:
            if not self.accumulate:
                self.out[e].zero_()
            return False
        self._fresh = not self.accumulate
        self._target = self.out[e]
        if self._target.dtype != self.scratch.dtype:
            shape = self._target.shape if self._target.ndim == 2 else (1, self._target.numel())
            self._target = self.scratch.take("grad " + self.name, *shape).view(self.out[e].shape)
            if self.accumulate:
                self._target.copy_(self.out[e])
        return True

    def add_product(self, left_NL: Tensor, right_NR: Tensor) -> None:
        """target += left^T right."""
        if self._fresh:
            torch.mm(left_NL.t(), right_NR, out=self._target)
        else:
            self._target.addmm_(left_NL.t(), right_NR)
        self._fresh = False

    def add_rows(self, rows_NC: Tensor, scale_N: Tensor | None) -> None:
        """target += sum of scale * row."""
        total = rows_NC.sum(0) if scale_N is None else torch.mv(rows_NC.t(), scale_N)
        if self._fresh:
            self._target.copy_(total)
        else:
            self._target.add_(total)
        self._fresh = False

    def end(self, e: int) -> None:
        """Round and store expert e."""
        store(self.out[e], self._target)
