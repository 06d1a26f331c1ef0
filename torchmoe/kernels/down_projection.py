# mypy: ignore-errors
"""Y = A W2^T + b2: the second grouped GEMM of the forward pass, over contiguous rows."""

import triton
import triton.language as tl

from torchmoe.kernels.tiles import locate_tile, main_loop, swizzle, widen


@triton.jit(do_not_specialize=["num_row_tiles"])
def down_projection_kernel(
    a_ptr,  # [P, F] activated rows, contiguous
    offsets_ptr,  # [E + 1] int32
    w2_ptr,  # [E, D, F] down weight
    b2_ptr,  # [E, D]; only read if BIAS
    y_ptr,  # [P, D] out, contiguous
    num_row_tiles,
    D,
    F,
    stride_w2e,
    stride_w2d,
    stride_w2f,
    stride_b2e,
    stride_b2d,
    E: tl.constexpr,
    E_POW2: tl.constexpr,
    BIAS: tl.constexpr,
    INDEX_64: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """y[p] = a[p] W2[e]^T + b2[e], gates not applied (combine does, in fp32).

    Reads: P*F elements of A once per column tile, the weights of experts with rows once per row tile group. Writes: P*D.
    Grid: (row tiles bound) * ceil(D / BLOCK_N). Owner: one program owns a [BLOCK_M, BLOCK_N] tile of Y and sums over F in
    order: bit-equal for one configuration. Accumulates in fp32, rounds once.
    """
    tile_m, tile_n = swizzle(tl.program_id(0), num_row_tiles, tl.cdiv(D, BLOCK_N), GROUP_M)
    expert, row_start, row_end = locate_tile(offsets_ptr, tile_m, E, E_POW2, BLOCK_M)
    if expert >= E:
        return

    local_rows = tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    safe_rows = tl.minimum(local_rows, row_end - row_start - 1)
    columns_mask = columns < D
    lane = tl.arange(0, BLOCK_K)

    a_ptrs = a_ptr + row_start.to(tl.int64) * F + safe_rows[:, None] * F + lane[None, :]
    w2_base = w2_ptr + expert.to(tl.int64) * stride_w2e
    w2_ptrs = w2_base + widen(columns, INDEX_64)[None, :] * stride_w2d + lane[:, None] * stride_w2f

    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    acc, _ = main_loop(
        acc, acc, a_ptrs, w2_ptrs, w2_ptrs, columns_mask, F, 1, stride_w2f, stride_w2f, False, EVEN_N, EVEN_K, BLOCK_K, PRECISION
    )

    if BIAS:
        b2 = tl.load(b2_ptr + expert.to(tl.int64) * stride_b2e + columns * stride_b2d, mask=columns_mask, other=0.0)
        acc += b2.to(tl.float32)[None, :]
    mask = (local_rows < row_end - row_start)[:, None] & columns_mask[None, :]
    y_base = y_ptr + row_start.to(tl.int64) * D
    tl.store(y_base + local_rows[:, None] * D + columns[None, :], acc.to(y_ptr.dtype.element_ty), mask=mask)
