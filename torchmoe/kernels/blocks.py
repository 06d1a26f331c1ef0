"""Blocks of an expert's rows: the unit of work of the reference kernels, and the few steps they are made of.

A block has at most ``BLOCK_ROWS`` rows, so its products stay in cache and scratch memory is bounded. Every step computes in the
accumulation dtype; what is stored in a narrower dtype is rounded once and read back rounded.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

from torchmoe.costs.experts import BLOCK_ROWS

__all__ = [
    "ALIGNMENT",
    "BLOCK_ROWS",
    "Block",
    "GradSink",
    "RowBlocks",
    "Scratch",
    "accumulation_dtype",
    "experts_of",
    "project",
    "store",
]

ALIGNMENT = 64
"""Bytes; what torch gives every allocation on a CPU."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 stays fp64, everything narrower is summed in fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Block(NamedTuple):
    """At most ``BLOCK_ROWS`` rows of one expert; whether they are its first and its last."""

    expert: int
    first: bool
    last: bool


class RowBlocks:
    """The rows of a queue, cut into blocks in order. ``empty`` are the experts without rows."""

    def __init__(self, offsets_E1: Tensor) -> None:
        bounds = offsets_E1.tolist()
        self.blocks: list[Block] = []
        self.empty: list[int] = []
        self._sizes: list[int] = []
        self._end = bounds[-1]
        for e, (start, stop) in enumerate(itertools.pairwise(bounds)):
            if start == stop:
                self.empty.append(e)
            for row in range(start, stop, BLOCK_ROWS):
                last = row + BLOCK_ROWS >= stop
                self.blocks.append(Block(e, row == start, last))
                self._sizes.append(stop - row if last else BLOCK_ROWS)

    @overload
    def cut(self, values: Tensor) -> Sequence[Tensor]: ...
    @overload
    def cut(self, values: Tensor | None) -> Sequence[Any]: ...
    def cut(self, values: Tensor | None) -> Sequence[Tensor | None]:
        """``values`` [P, ...] as one view per block (made at once: a view costs as much as a small product)."""
        return [None] * len(self.blocks) if values is None else torch.split(values[: self._end], self._sizes)


def experts_of(weight: Tensor | None, num_experts: int) -> Sequence[Any]:
    """One view per expert, or that many None."""
    return [None] * num_experts if weight is None else weight.unbind(0)


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
        """Rows of a product as an aligned, contiguous block in the accumulation dtype."""
        if values.dtype == self.dtype and values.is_contiguous() and values.data_ptr() % ALIGNMENT == 0:
            return values
        return self.take(name, values.size(0), values.size(1)).copy_(values)

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
    """Where one weight's or bias's gradient is summed, block by block, and rounded once per expert to ``out``'s dtype.

    Args:
        out: [E, ...], may be a strided view.
        accumulate: add to what is there; else overwrite, with exact zeros for experts without rows.
    """

    def __init__(self, out: Tensor, accumulate: bool, scratch: Scratch, name: str, rows: RowBlocks) -> None:
        self._out, self._accumulate, self._scratch, self._name = out.unbind(0), accumulate, scratch, name
        if not accumulate:
            for e in rows.empty:
                self._out[e].zero_()

    def add_product(self, block: Block, left_NL: Tensor, right_NR: Tensor) -> None:
        """Add left^T right."""
        target = self._target(block)
        if block.first and not self._accumulate:
            torch.mm(left_NL.t(), right_NR, out=target)
        else:
            target.addmm_(left_NL.t(), right_NR)
        self._close(block, target)

    def add_rows(self, block: Block, rows_NC: Tensor, scale_N: Tensor | None) -> None:
        """Add the sum of scale * row."""
        target = self._target(block)
        total = rows_NC.sum(0) if scale_N is None else torch.mv(rows_NC.t(), scale_N.to(rows_NC.dtype))
        if block.first and not self._accumulate:
            target.copy_(total)
        else:
            target.add_(total)
        self._close(block, target)

    def _target(self, block: Block) -> Tensor:
        out = self._out[block.expert]
        if out.dtype == self._scratch.dtype:
            return out
        shape = out.shape if out.ndim == 2 else (1, out.numel())
        wide = self._scratch.take("grad " + self._name, *shape).view(out.shape)
        return wide.copy_(out) if block.first and self._accumulate else wide

    def _close(self, block: Block, target: Tensor) -> None:
        if block.last:
            store(self._out[block.expert], target)
