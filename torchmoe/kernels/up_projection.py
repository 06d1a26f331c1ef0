# mypy: ignore-errors
"""A = act(X W1^T + b1, X W3^T + b3): the first grouped GEMM, with x gathered inside its loads."""

import triton
import triton.language as tl

from torchmoe.kernels.epilogues import activate
from torchmoe.kernels.tiles import locate_tile, main_loop, split_columns, swizzle, widen


@triton.jit(do_not_specialize=["num_row_tiles"])
def up_projection_kernel(
    x_ptr,  # [T, D] tokens
    indices_ptr,  # [P] int32, token of each row
    offsets_ptr,  # [E + 1] int32
    w1_ptr,  # [E, F, D] gate weight
    w3_ptr,  # [E, F, D] up weight; only read if GLU
    b1_ptr,  # [E, F]; only read if BIAS
    b3_ptr,  # [E, F]; only read if BIAS and GLU
    a_ptr,  # [P, F] out
    gate_ptr,  # [P, F] out; only written if SAVE_HALVES
    up_ptr,  # [P, F] out; only written if SAVE_HALVES == 2
    num_row_tiles,
    D,
    F,
    stride_xt,
    stride_xd,
    stride_w1e,
    stride_w1f,
    stride_w1d,
    stride_w3e,
    stride_w3f,
    stride_w3d,
    stride_b1e,
    stride_b1f,
    stride_b3e,
    stride_b3f,
    E: tl.constexpr,
    E_POW2: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GLU: tl.constexpr,
    BIAS: tl.constexpr,
    SAVE_HALVES: tl.constexpr,  # of H: 0, 1 (the gate, or all of it without GLU) or 2 (gate and up)
    INDEX_64: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    PARTS: tl.constexpr,  # the epilogue works on BLOCK_N / PARTS columns at a time
):
    """h[p] = x[indices[p]] W1[e]^T + b1[e] | ... W3[e]^T + b3[e], rounded to the storage dtype; a[p] = act(h[p]).

    Reads: P*D elements of x (each row once per column tile, gate and up from the same tile), the weights of experts with
    rows once per row tile group. Writes: P*F elements of A and, if asked, P*2F of H.
    Grid: (row tiles bound) * ceil(F / BLOCK_N). Owner: one program owns a [BLOCK_M, BLOCK_N] tile of A and H, sums over D
    in order: bit-equal for one configuration. Accumulates in fp32; A is computed from the rounded H, so that a backward
    pass which knows H only finds the same A.
    """
    tile_m, tile_n = swizzle(tl.program_id(0), num_row_tiles, tl.cdiv(F, BLOCK_N), GROUP_M)
    expert, row_start, row_end = locate_tile(offsets_ptr, tile_m, E, E_POW2, BLOCK_M)
    if expert >= E:
        return

    rows = row_start + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows past the end repeat the last valid one: their sums are never stored, and the loads need no mask.
    tokens = tl.load(indices_ptr + tl.minimum(rows, row_end - 1))
    columns_mask = columns < F
    lane = tl.arange(0, BLOCK_K)

    x_ptrs = x_ptr + widen(tokens, INDEX_64)[:, None] * stride_xt + lane[None, :] * stride_xd
    w1_base = w1_ptr + expert.to(tl.int64) * stride_w1e
    w1_ptrs = w1_base + widen(columns, INDEX_64)[None, :] * stride_w1f + lane[:, None] * stride_w1d
    w3_base = w3_ptr + expert.to(tl.int64) * stride_w3e
    w3_ptrs = w3_base + widen(columns, INDEX_64)[None, :] * stride_w3f + lane[:, None] * stride_w3d

    gate = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    gate, up = main_loop(
        gate,
        up,
        x_ptrs,
        w1_ptrs,
        w3_ptrs,
        columns_mask,
        D,
        stride_xd,
        stride_w1d,
        stride_w3d,
        GLU,
        EVEN_N,
        EVEN_K,
        BLOCK_K,
        PRECISION,
    )

    # One part of the columns at a time: two accumulators and the whole tile's epilogue do not fit in the registers.
    row_base = row_start.to(tl.int64)
    rows = tl.arange(0, BLOCK_M)[:, None]
    row_mask = rows < row_end - row_start
    gate_parts = split_columns(gate, PARTS)
    up_parts = split_columns(up, PARTS)
    storage = a_ptr.dtype.element_ty
    for part in tl.static_range(PARTS):
        columns = tile_n * BLOCK_N + part * (BLOCK_N // PARTS) + tl.arange(0, BLOCK_N // PARTS)
        inside = columns < F
        mask = row_mask & inside[None, :]
        gate_part = gate_parts[part]
        up_part = up_parts[part]
        if BIAS:
            b1 = tl.load(b1_ptr + expert.to(tl.int64) * stride_b1e + columns * stride_b1f, mask=inside, other=0.0)
            gate_part += b1.to(tl.float32)[None, :]
            if GLU:
                b3 = tl.load(b3_ptr + expert.to(tl.int64) * stride_b3e + columns * stride_b3f, mask=inside, other=0.0)
                up_part += b3.to(tl.float32)[None, :]
        gate_stored = gate_part.to(storage)
        up_stored = up_part.to(storage)
        activated = activate(gate_stored.to(tl.float32), up_stored.to(tl.float32), ACTIVATION)
        local = rows * F + columns[None, :]
        tl.store(a_ptr + row_base * F + local, activated.to(storage), mask=mask)
        if SAVE_HALVES > 0:
            tl.store(gate_ptr + row_base * F + local, gate_stored, mask=mask)
        if SAVE_HALVES == 2:
            tl.store(up_ptr + row_base * F + local, up_stored, mask=mask)
