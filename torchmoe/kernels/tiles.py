# mypy: ignore-errors
"""What the grouped GEMM kernels share: which expert a tile belongs to, and the one main loop.

Shapes: P rows (token, expert pairs) sorted by expert, E experts. Every tile of rows lies inside one expert, so the
number of row tiles depends on the routing. The grid must not (reading it would stop the host), hence it is the upper
bound `row_tiles` below and programs past the last tile return at once.
"""

import triton
import triton.language as tl


@triton.jit
def locate_tile(
    offsets_ptr,  # [E + 1] int32, first row of each expert
    tile,  # index of the row tile, counted over all experts
    E: tl.constexpr,
    E_POW2: tl.constexpr,  # next power of two >= E
    BLOCK_M,  # rows of a tile
):
    """Expert, first row and end row of one row tile; an expert >= E says that the tile does not exist.

    Each program sums the tiles of the experts before it from the E offsets (one vector load and a scan in registers):
    about the latency of two dependent loads, without a table that another kernel must fill first.
    """
    expert_ids = tl.arange(0, E_POW2)
    valid = expert_ids < E
    starts = tl.load(offsets_ptr + expert_ids, mask=valid, other=0)
    ends = tl.load(offsets_ptr + expert_ids + 1, mask=valid, other=0)
    tiles = (ends - starts + (BLOCK_M - 1)) // BLOCK_M
    last_tiles = tl.cumsum(tiles, 0)
    before = (last_tiles <= tile) & valid
    expert = tl.sum(before.to(tl.int32), 0)
    first_tile = tl.sum(tl.where(before, tiles, 0), 0)
    row_start = 0
    row_end = 0
    if expert < E:
        row_end = tl.load(offsets_ptr + expert + 1)
        row_start = tl.load(offsets_ptr + expert) + (tile - first_tile) * BLOCK_M
    return expert, row_start, row_end


@triton.jit
def swizzle(pid, num_tiles_m, num_tiles_n, GROUP_M: tl.constexpr):
    """(row tile, column tile) of a program: GROUP_M row tiles walk all columns together, so a weight tile stays in L2."""
    group_size = GROUP_M * num_tiles_n
    group = pid // group_size
    first_m = group * GROUP_M
    rows_in_group = min(num_tiles_m - first_m, GROUP_M)
    tile_m = first_m + (pid % group_size) % rows_in_group
    tile_n = (pid % group_size) // rows_in_group
    return tile_m, tile_n


@triton.jit
def widen(offset, INDEX_64: tl.constexpr):
    """Offsets are 32-bit unless the host saw that they can overflow: 64-bit ones cost registers."""
    if INDEX_64:
        offset = offset.to(tl.int64)
    return offset


@triton.jit
def main_loop(
    acc,  # [BLOCK_M, BLOCK_N] fp32
    acc_dual,  # the same shape; handed through untouched unless DUAL
    left_ptrs,  # [BLOCK_M, BLOCK_K] pointers, every row valid
    right_ptrs,  # [BLOCK_K, BLOCK_N] pointers
    right_dual_ptrs,  # the same shape; only read if DUAL
    columns_mask,  # [BLOCK_N] columns that exist; not used if EVEN_N
    reduction,  # length of the summed dimension
    left_step,  # stride of the summed dimension
    right_step,
    right_dual_step,
    DUAL: tl.constexpr,
    EVEN_N: tl.constexpr,  # every column of every tile exists
    EVEN_K: tl.constexpr,  # BLOCK_K divides the reduction
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """acc += left @ right (and acc_dual += left @ right_dual with the same left tile), summed in order in fp32.

    Two accumulators, never two products into one: a compiler for Blackwell got the latter wrong (Liger-Kernel 0.8.5).
    Columns are masked, not clamped: a clamp hides from the compiler that they are contiguous, and 16-byte copies with it.
    """
    lane = tl.arange(0, BLOCK_K)
    for k in range(0, reduction, BLOCK_K):
        left_valid = lane[None, :] < reduction - k
        right_valid = lane[:, None] < reduction - k
        if not EVEN_N:
            right_valid = right_valid & columns_mask[None, :]
        if EVEN_K:
            left = tl.load(left_ptrs)
        else:
            left = tl.load(left_ptrs, mask=left_valid, other=0.0)
        acc = tl.dot(left, _right_tile(right_ptrs, right_valid, EVEN_N and EVEN_K), acc, input_precision=PRECISION)
        if DUAL:
            right_dual = _right_tile(right_dual_ptrs, right_valid, EVEN_N and EVEN_K)
            acc_dual = tl.dot(left, right_dual, acc_dual, input_precision=PRECISION)
            right_dual_ptrs += BLOCK_K * right_dual_step
        left_ptrs += BLOCK_K * left_step
        right_ptrs += BLOCK_K * right_step
    return acc, acc_dual


@triton.jit
def _right_tile(ptrs, valid, ALL_VALID: tl.constexpr):
    if ALL_VALID:
        tile = tl.load(ptrs)
    else:
        tile = tl.load(ptrs, mask=valid, other=0.0)
    return tile


@triton.jit
def split_columns(tile, PARTS: tl.constexpr):
    """A [M, N] tile as a tuple of PARTS (1, 2 or 4) tiles of N / PARTS neighbouring columns, without moving registers."""
    if PARTS == 1:
        result = (tile,)
    elif PARTS == 2:
        result = _halves(tile)
    else:
        left, right = _halves(tile)
        result = _halves(left) + _halves(right)
    return result


@triton.jit
def _halves(tile):
    split: tl.constexpr = tile.shape[1] // 2
    return tile.reshape(tile.shape[0], 2, split).permute(0, 2, 1).split()
