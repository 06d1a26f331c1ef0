# mypy: ignore-errors
"""dX per row = dH1 W1 + dH3 W3: the gradient of the rows, summed per token afterwards by the combine kernel."""

import triton
import triton.language as tl

from torchmoe.kernels.tiles import locate_tile, main_loop, swizzle, widen


@triton.jit(do_not_specialize=["num_row_tiles"])
def input_grad_kernel(
    dh1_ptr,  # [P, F] of the gate, contiguous
    dh3_ptr,  # [P, F] of up, contiguous; only read if GLU
    offsets_ptr,  # [E + 1] int32
    w1_ptr,  # [E, F, D]
    w3_ptr,  # [E, F, D]; only read if GLU
    dxr_ptr,  # [P, D] out, contiguous
    num_row_tiles,
    D,
    F,
    stride_w1e,
    stride_w1f,
    stride_w1d,
    stride_w3e,
    stride_w3f,
    stride_w3d,
    E: tl.constexpr,
    E_POW2: tl.constexpr,
    GLU: tl.constexpr,
    INDEX_64: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """dxr[p] = dh1[p] W1[e] + dh3[p] W3[e]; the gate is already in dH.

    Reads: P*2F elements of dH once per column tile, the weights of experts with rows once per row tile group. Writes: P*D.
    Grid: (row tiles bound) * ceil(D / BLOCK_N). Owner: one program owns a [BLOCK_M, BLOCK_N] tile of dxr; it sums over F of
    the gate half, then over F of the up half, in order: bit-equal for one configuration. Accumulates in fp32, rounds once.
    """
    tile_m, tile_n = swizzle(tl.program_id(0), num_row_tiles, tl.cdiv(D, BLOCK_N), GROUP_M)
    expert, row_start, row_end = locate_tile(offsets_ptr, tile_m, E, E_POW2, BLOCK_M)
    if expert >= E:
        return

    local_rows = tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    safe_rows = tl.minimum(local_rows, row_end - row_start - 1)
    columns_mask = columns < D
    wide_columns = widen(columns, INDEX_64)
    lane = tl.arange(0, BLOCK_K)

    first_row = row_start.to(tl.int64) * F
    dh_tile = safe_rows[:, None] * F + lane[None, :]
    w1_base = w1_ptr + expert.to(tl.int64) * stride_w1e
    w1_ptrs = w1_base + wide_columns[None, :] * stride_w1d + widen(lane, INDEX_64)[:, None] * stride_w1f
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    acc, _ = main_loop(
        acc,
        acc,
        dh1_ptr + first_row + dh_tile,
        w1_ptrs,
        w1_ptrs,
        columns_mask,
        F,
        1,
        stride_w1f,
        stride_w1f,
        False,
        EVEN_N,
        EVEN_K,
        BLOCK_K,
        PRECISION,
    )
    if GLU:
        w3_base = w3_ptr + expert.to(tl.int64) * stride_w3e
        w3_ptrs = w3_base + wide_columns[None, :] * stride_w3d + widen(lane, INDEX_64)[:, None] * stride_w3f
        acc, _ = main_loop(
            acc,
            acc,
            dh3_ptr + first_row + dh_tile,
            w3_ptrs,
            w3_ptrs,
            columns_mask,
            F,
            1,
            stride_w3f,
            stride_w3f,
            False,
            EVEN_N,
            EVEN_K,
            BLOCK_K,
            PRECISION,
        )

    mask = (local_rows < row_end - row_start)[:, None] & columns_mask[None, :]
    dxr_base = dxr_ptr + row_start.to(tl.int64) * D
    tl.store(dxr_base + local_rows[:, None] * D + columns[None, :], acc.to(dxr_ptr.dtype.element_ty), mask=mask)
