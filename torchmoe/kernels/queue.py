# mypy: ignore-errors
"""The dispatch queue without a sort: count per tile, scan the columns, place by rank in the tile.

The (token, slot) pairs are cut into tiles. 1. Every tile counts its pairs per expert. 2. Every expert turns its column of
counts into starts. 3. Every pair's row is (first row of its expert) + (start of its tile) + (rank in its tile). Integers
only, no atomics on memory, one owner per element: rows come out by expert, then token, then slot, every time. The counts
are [tiles, E] integers where MoEBlaze's dense map has T*E.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_pairs"])
def count_pairs_kernel(
    ids_ptr,  # [T * K] int32 or int64 expert ids; whatever is outside [0, E) is dropped
    counts_ptr,  # [tiles, E] int32 out
    num_pairs,
    E: tl.constexpr,
    BINS: tl.constexpr,  # power of two > E; bin E collects the dropped pairs
    TILE: tl.constexpr,
):
    """counts[tile, e] = pairs of the tile that go to expert e.

    Reads: T*K ids. Writes: tiles*E counts. Grid: tiles. Owner: one program owns its row of counts.
    """
    tile = tl.program_id(0)
    pairs = tile * TILE + tl.arange(0, TILE)
    ids = tl.load(ids_ptr + pairs, mask=pairs < num_pairs, other=-1)
    ids = tl.where((ids >= 0) & (ids < E), ids, E).to(tl.int32)
    counts = tl.histogram(ids, BINS)
    bins = tl.arange(0, BINS)
    tl.store(counts_ptr + tile.to(tl.int64) * E + bins, counts, mask=bins < E)


@triton.jit(do_not_specialize=["num_tiles"])
def scan_columns_kernel(
    counts_ptr,  # [tiles, E] int32 in; starts of each tile within its expert out
    totals_ptr,  # [E] int32 out
    num_tiles,
    E: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """counts[tile, e] := sum of counts[:tile, e]; totals[e] = sum of the column.

    Reads and writes: tiles*E counts. Grid: ceil(E / BLOCK_E). Owner: one program owns BLOCK_E columns.
    """
    experts = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    valid = experts < E
    running = tl.zeros((BLOCK_E,), dtype=tl.int32)
    for first in range(0, num_tiles, BLOCK_T):
        tiles = first + tl.arange(0, BLOCK_T)
        ptrs = counts_ptr + tiles.to(tl.int64)[:, None] * E + experts[None, :]
        mask = (tiles < num_tiles)[:, None] & valid[None, :]
        counts = tl.load(ptrs, mask=mask, other=0)
        tl.store(ptrs, running[None, :] + tl.cumsum(counts, 0) - counts, mask=mask)
        running += tl.sum(counts, 0)
    tl.store(totals_ptr + experts, running, mask=valid)


@triton.jit(do_not_specialize=["num_pairs", "num_rows"])
def place_pairs_kernel(
    ids_ptr,  # [T * K] expert ids, as in count_pairs_kernel
    starts_ptr,  # [tiles, E] int32, from scan_columns_kernel
    totals_ptr,  # [E] int32
    indices_ptr,  # [P] int32 out, token of each row, -1 behind the last
    offsets_ptr,  # [E + 1] int32 out
    map_ptr,  # [T * K] int32 out, row of each pair or -1
    overflowed_ptr,  # [1] bool out
    num_pairs,
    num_rows,  # P
    K,
    E: tl.constexpr,
    BINS: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,  # pairs of the tile that are compared with all others at once
):
    """map[pair] = offsets[e] + starts[tile, e] + (pairs of the tile before it with the same e); indices[row] = pair // K.

    Reads: T*K ids, tiles*E starts, E totals per tile. Writes: T*K rows, P indices, E + 1 offsets. Grid: tiles that cover both
    T*K and P. Owner: each pair owns its row; the tile whose positions lie behind the last row fills those with -1.
    Rows that do not fit in P are dropped from the end and set the flag.
    """
    tile = tl.program_id(0)
    bins = tl.arange(0, BINS)
    totals = tl.load(totals_ptr + bins, mask=bins < E, other=0)
    ends = tl.cumsum(totals, 0)
    kept = tl.sum(totals, 0)
    if tile == 0:
        tl.store(offsets_ptr, 0)
        tl.store(offsets_ptr + 1 + bins, tl.minimum(ends, num_rows), mask=bins < E)
        tl.store(overflowed_ptr, kept > num_rows)

    lane = tl.arange(0, TILE)
    pairs = tile * TILE + lane
    exists = pairs < num_pairs
    ids = tl.load(ids_ptr + pairs, mask=exists, other=-1)
    routed = (ids >= 0) & (ids < E)
    ids = tl.where(routed, ids, E).to(tl.int32)
    rank = tl.zeros((TILE,), dtype=tl.int32)
    for start in range(0, TILE, CHUNK):
        other_lane = start + tl.arange(0, CHUNK)
        others = tl.load(ids_ptr + tile * TILE + other_lane, mask=tile * TILE + other_lane < num_pairs, other=-1)
        others = tl.where((others >= 0) & (others < E), others, -1).to(tl.int32)
        same = ids[:, None] == others[None, :]
        rank += tl.sum((same & (other_lane[None, :] < lane[:, None])).to(tl.int32), 1)
    first = tl.load(starts_ptr + tile.to(tl.int64) * E + ids, mask=routed, other=0)
    row = tl.gather(ends - totals, ids, 0) + first + rank
    fits = routed & (row < num_rows)
    tl.store(map_ptr + pairs, tl.where(fits, row, -1), mask=exists)
    tl.store(indices_ptr + row, pairs // K, mask=fits)
    tl.store(indices_ptr + pairs, tl.full((TILE,), -1, tl.int32), mask=(pairs >= kept) & (pairs < num_rows))
