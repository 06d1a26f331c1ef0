# mypy: ignore-errors
"""y[t] = sum_k gate[t, k] * rows[map[t, k]]: rows of experts back to tokens, by gather."""

import triton
import triton.language as tl

from torchmoe.kernels.tiles import widen


@triton.jit
def combine_kernel(
    rows_ptr,  # [P, D] expert outputs, or gradients of the gathered rows
    map_ptr,  # [T, K] int32, row of each slot or -1; [N] if RAGGED
    gates_ptr,  # [T, K] or [N]; only read if GATED
    token_offsets_ptr,  # [T + 1], first slot of each token; only read if RAGGED
    y_ptr,  # [T, D] out, contiguous
    D,
    stride_rp,
    stride_rd,
    stride_mt,
    stride_mk,
    stride_gt,
    stride_gk,
    K: tl.constexpr,  # slots of each token; not used if RAGGED
    GATED: tl.constexpr,
    RAGGED: tl.constexpr,
    INDEX_64: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """y[t] = sum over the slots of t, in slot order, of gate * row; fp32, rounded once.

    Reads: one row of D per kept slot. Writes: T*D. Grid: (T, ceil(D / BLOCK_D)). Owner: each token owns its output row, so
    nothing is added by two programs: bit-equal, and a token's result does not depend on other tokens. A dropped slot (-1)
    is not read and adds nothing, whatever its gate holds.
    """
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = columns < D
    rows_ptrs = rows_ptr + widen(columns, INDEX_64) * stride_rd
    total = tl.zeros((BLOCK_D,), dtype=tl.float32)
    if RAGGED:
        first = tl.load(token_offsets_ptr + token)
        last = tl.load(token_offsets_ptr + token + 1)
        for slot in range(first, last):
            total = _add_row(
                total, rows_ptrs, map_ptr + slot * stride_mk, gates_ptr + slot * stride_gk, columns, D, stride_rp, GATED
            )
    else:
        map_base = map_ptr + token * stride_mt
        gates_base = gates_ptr + token * stride_gt
        for k in tl.static_range(K):
            total = _add_row(total, rows_ptrs, map_base + k * stride_mk, gates_base + k * stride_gk, columns, D, stride_rp, GATED)
    tl.store(y_ptr + token * D + columns, total.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _add_row(total, rows_ptrs, row_ptr, gate_ptr, columns, D, stride_rp, GATED: tl.constexpr):
    row = tl.load(row_ptr)
    kept = row >= 0
    value = tl.load(rows_ptrs + row.to(tl.int64) * stride_rp, mask=columns < tl.where(kept, D, 0), other=0.0).to(tl.float32)
    if GATED:
        value *= tl.load(gate_ptr, mask=kept, other=0.0).to(tl.float32)
    return total + value
