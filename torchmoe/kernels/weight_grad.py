# mypy: ignore-errors
"""dW[e] = left[rows of e]^T right[rows of e]: the weight gradients, with x or dY gathered in the reduction dimension."""

import triton
import triton.language as tl

from torchmoe.kernels.tiles import split_columns, swizzle, widen


@triton.jit
def locate_slice(offsets_ptr, index, slice_rows, E: tl.constexpr, E_POW2: tl.constexpr):
    """Expert, first and end row of one slice of a reduction, and its place in the workspace (-1: the expert has one slice).

    Every expert has ceil(rows / slice_rows) slices, and at least one, so that experts without rows are written too.
    """
    expert_ids = tl.arange(0, E_POW2)
    valid = expert_ids < E
    starts = tl.load(offsets_ptr + expert_ids, mask=valid, other=0)
    ends = tl.load(offsets_ptr + expert_ids + 1, mask=valid, other=0)
    slices = tl.maximum((ends - starts + (slice_rows - 1)) // slice_rows, 1)
    slices = tl.where(valid, slices, 0)
    before = (tl.cumsum(slices, 0) <= index) & valid
    expert = tl.sum(before.to(tl.int32), 0)
    inner = index - tl.sum(tl.where(before, slices, 0), 0)
    place = tl.sum(tl.where(before & (slices > 1), slices, 0), 0) + inner
    own = tl.sum(tl.where(expert_ids == expert, slices, 0), 0)
    row_start = 0
    row_end = 0
    if expert < E:
        end = tl.load(offsets_ptr + expert + 1)
        row_start = tl.load(offsets_ptr + expert) + inner * slice_rows
        row_end = tl.minimum(row_start + slice_rows, end)
    if own == 1:
        place = -1
    return expert, row_start, row_end, place


@triton.jit(do_not_specialize=["slice_rows"])
def weight_grad_kernel(
    left_ptr,  # [P, M] rows, or [T, M] if GATHER_LEFT
    right_ptr,  # [P, N] rows, or [T, N] if GATHER_RIGHT
    left_indices_ptr,  # [P] int32; only read if GATHER_LEFT
    right_indices_ptr,  # [P] int32; only read if GATHER_RIGHT
    offsets_ptr,  # [E + 1] int32
    out_ptr,  # [E, M, N] in and out
    partials_ptr,  # [slices of split experts, M, N] fp32 out; only written if SPLIT
    slice_rows,
    M,
    N,
    stride_lp,
    stride_lm,
    stride_rp,
    stride_rn,
    stride_oe,
    stride_om,
    stride_on,
    E: tl.constexpr,
    E_POW2: tl.constexpr,
    GATHER_LEFT: tl.constexpr,
    GATHER_RIGHT: tl.constexpr,
    SPLIT: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    INDEX_64: tl.constexpr,
    EVEN_M: tl.constexpr,  # BLOCK_M divides M
    EVEN_N: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    PARTS: tl.constexpr,  # the epilogue works on BLOCK_N / PARTS columns at a time
):
    """out[e] (+)= sum over the rows p of e of left[p]^T right[p]; a gathered side is read at indices[p], without a copy.

    Reads: rows*M elements of left per column tile and rows*N of right per row tile. Writes: M*N of out per expert.
    Grid: (E, or the bound on slices) * ceil(M / BLOCK_M) * ceil(N / BLOCK_N). Owner: one program owns a tile of out[e] and
    sums rows in order; with SPLIT the slices of a long expert go to their own place in partials and reduce_slices_kernel adds
    them in order. No atomics: bit-equal for one configuration. fp32 accumulation, also onto out. No rows: exact zeros.
    """
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    index = tl.program_id(0) // (tiles_m * tiles_n)
    tile_m, tile_n = swizzle(tl.program_id(0) % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_M)
    if SPLIT:
        expert, row_start, row_end, place = locate_slice(offsets_ptr, index, slice_rows, E, E_POW2)
        if expert >= E:
            return
    else:
        expert = index
        row_start = tl.load(offsets_ptr + expert)
        row_end = tl.load(offsets_ptr + expert + 1)
        place = -1

    columns_m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    left_columns = widen(columns_m, INDEX_64)[None, :] * stride_lm
    right_columns = widen(columns_n, INDEX_64)[None, :] * stride_rn
    lane = tl.arange(0, BLOCK_K)
    # Rows in place: the base is 64-bit and moves with the loop, so the offsets inside stay small.
    left_ptrs = left_ptr + left_columns
    right_ptrs = right_ptr + right_columns
    if not GATHER_LEFT:
        left_ptrs += row_start.to(tl.int64) * stride_lp + widen(lane, INDEX_64)[:, None] * stride_lp
    if not GATHER_RIGHT:
        right_ptrs += row_start.to(tl.int64) * stride_rp + widen(lane, INDEX_64)[:, None] * stride_rp

    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for row in range(row_start, row_end, BLOCK_K):
        exists = lane < row_end - row
        left_valid = exists[:, None]
        right_valid = exists[:, None]
        if not EVEN_M:
            left_valid = left_valid & (columns_m < M)[None, :]
        if not EVEN_N:
            right_valid = right_valid & (columns_n < N)[None, :]
        if GATHER_LEFT:
            left_rows = tl.load(left_indices_ptr + row + lane, mask=exists, other=0)
            left = tl.load(left_ptrs + widen(left_rows, INDEX_64)[:, None] * stride_lp, mask=left_valid, other=0.0)
        else:
            left = tl.load(left_ptrs, mask=left_valid, other=0.0)
            left_ptrs += BLOCK_K * stride_lp
        if GATHER_RIGHT:
            right_rows = tl.load(right_indices_ptr + row + lane, mask=exists, other=0)
            right = tl.load(right_ptrs + widen(right_rows, INDEX_64)[:, None] * stride_rp, mask=right_valid, other=0.0)
        else:
            right = tl.load(right_ptrs, mask=right_valid, other=0.0)
            right_ptrs += BLOCK_K * stride_rp
        acc = tl.dot(tl.trans(left), right, acc, input_precision=PRECISION)

    rows_m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    out_base = out_ptr + tl.cast(expert, tl.int64) * stride_oe + widen(rows_m, INDEX_64)[:, None] * stride_om
    parts = split_columns(acc, PARTS)
    for part in tl.static_range(PARTS):
        first = tile_n * BLOCK_N + part * (BLOCK_N // PARTS)
        columns = first + tl.arange(0, BLOCK_N // PARTS)
        mask = (rows_m < M)[:, None] & (columns < N)[None, :]
        value = parts[part]
        if SPLIT and place >= 0:
            partials_base = partials_ptr + place.to(tl.int64) * (tl.cast(M, tl.int64) * N)
            tl.store(partials_base + widen(rows_m, INDEX_64)[:, None] * N + columns[None, :], value, mask=mask)
        else:
            out_ptrs = out_base + widen(columns, INDEX_64)[None, :] * stride_on
            if ACCUMULATE:
                value += tl.load(out_ptrs, mask=mask, other=0.0).to(tl.float32)
            tl.store(out_ptrs, value.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["slice_rows"])
def reduce_slices_kernel(
    partials_ptr,  # [slices of split experts, M, N] fp32
    offsets_ptr,  # [E + 1] int32
    out_ptr,  # [E, M, N] in and out
    slice_rows,
    M,
    N,
    stride_oe,
    stride_om,
    stride_on,
    E: tl.constexpr,
    E_POW2: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    INDEX_64: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """out[e] (+)= sum of the slices of e in order, for the experts that have more than one.

    Reads: the partials once. Writes: M*N per split expert. Grid: (bound on split experts, ceil(M / BLOCK_M),
    ceil(N / BLOCK_N)). Owner: one program owns a tile of out[e]; fp32, in order: bit-equal.
    """
    expert_ids = tl.arange(0, E_POW2)
    valid = expert_ids < E
    starts = tl.load(offsets_ptr + expert_ids, mask=valid, other=0)
    ends = tl.load(offsets_ptr + expert_ids + 1, mask=valid, other=0)
    slices = (ends - starts + (slice_rows - 1)) // slice_rows
    slices = tl.where(slices > 1, slices, 0)
    rank = tl.cumsum((slices > 0).to(tl.int32), 0) - 1
    mine = (slices > 0) & (rank == tl.program_id(0))
    count = tl.sum(tl.where(mine, slices, 0), 0)
    if count == 0:
        return
    expert = tl.sum(tl.where(mine, expert_ids, 0), 0)
    place = tl.sum(tl.where(expert_ids < expert, slices, 0), 0)

    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (rows < M)[:, None] & (columns < N)[None, :]
    size = tl.cast(M, tl.int64) * N
    partial_ptrs = partials_ptr + place.to(tl.int64) * size + widen(rows, INDEX_64)[:, None] * N + columns[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for _ in range(count):
        total += tl.load(partial_ptrs, mask=mask, other=0.0)
        partial_ptrs += size
    out_base = out_ptr + expert.to(tl.int64) * stride_oe
    out_ptrs = out_base + widen(rows, INDEX_64)[:, None] * stride_om + widen(columns, INDEX_64)[None, :] * stride_on
    if ACCUMULATE:
        total += tl.load(out_ptrs, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def bias_grad_kernel(
    rows_ptr,  # [P, C] rows, or [T, C] if GATHER
    indices_ptr,  # [P] int32; only read if GATHER
    scale_ptr,  # [P] fp32; only read if SCALED
    offsets_ptr,  # [E + 1] int32
    out_ptr,  # [E, C] in and out
    C,
    stride_rp,
    stride_rc,
    stride_oe,
    stride_oc,
    GATHER: tl.constexpr,
    SCALED: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    INDEX_64: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """out[e] (+)= sum over the rows p of e of scale[p] * row: the gradients of the biases.

    Reads: P*C elements once. Writes: E*C. Grid: (E, ceil(C / BLOCK_C)). Owner: one program owns BLOCK_C elements of out[e];
    BLOCK_R running fp32 sums over the rows in order, then one fixed tree: bit-equal. No rows: exact zeros.
    """
    expert = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = columns < C
    row_start = tl.load(offsets_ptr + expert)
    row_end = tl.load(offsets_ptr + expert + 1)
    lane = tl.arange(0, BLOCK_R)
    column_ptrs = rows_ptr + widen(columns, INDEX_64)[None, :] * stride_rc
    total = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    for row in range(row_start, row_end, BLOCK_R):
        exists = lane < row_end - row
        rows = row + lane
        if GATHER:
            rows = tl.load(indices_ptr + rows, mask=exists, other=0)
        row_ptrs = column_ptrs + rows.to(tl.int64)[:, None] * stride_rp
        value = tl.load(row_ptrs, mask=exists[:, None] & inside[None, :], other=0.0).to(tl.float32)
        if SCALED:
            value *= tl.load(scale_ptr + row + lane, mask=exists, other=0.0)[:, None]
        total += value
    result = tl.sum(total, 0)
    out_ptrs = out_ptr + expert.to(tl.int64) * stride_oe + columns * stride_oc
    if ACCUMULATE:
        result += tl.load(out_ptrs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=inside)
