# mypy: ignore-errors
"""dH, A' and the gate gradient from one grouped GEMM: the heart of the minimal backward pass."""

import triton
import triton.language as tl

from torchmoe.kernels.epilogues import activate, activate_gradient
from torchmoe.kernels.tiles import locate_tile, main_loop, split_columns, swizzle, widen


@triton.jit(do_not_specialize=["num_row_tiles"])
def backward_hidden_kernel(
    dy_ptr,  # [T, D] gradient of the layer's output
    indices_ptr,  # [P] int32, token of each row
    offsets_ptr,  # [E + 1] int32
    gates_ptr,  # [P] fp32, gate of each row
    h1_ptr,  # [P, F] gate pre-activations, rows stride_h1 apart
    h3_ptr,  # [P, F] up pre-activations, rows stride_h3 apart; only read if GLU
    a_ptr,  # [P, F] A as the forward pass stored it, contiguous; only read if SAVED_A
    w2_ptr,  # [E, D, F] down weight
    dh1_ptr,  # [P, F] out, of the gate
    dh3_ptr,  # [P, F] out, of up; only written if GLU
    ag_ptr,  # [P, F] out, gate * A
    partials_ptr,  # [P, ceil(F / BLOCK_N)] fp32 out, one partial gate gradient per column tile
    num_row_tiles,
    D,
    F,
    stride_yt,
    stride_yd,
    stride_h1,
    stride_h3,
    stride_w2e,
    stride_w2d,
    stride_w2f,
    E: tl.constexpr,
    E_POW2: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GLU: tl.constexpr,
    SAVED_A: tl.constexpr,
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
    """dA' = dY W2 without the gate; partials = sum_F dA' * A; dH = gate * dA' * act'(H); ag = gate * A, A = act(H).

    Reads: P*D elements of dY (gathered, once per column tile), P*2F of H, the weights of experts with rows once per row
    tile group. Writes: P*2F of dH, P*F of ag, P fp32 partials per column tile. No copy of dY per row, no A, no Y.
    Grid: (row tiles bound) * ceil(F / BLOCK_N). Owner: one program owns its tile of dH and ag and one column of partials
    for its rows; the partials are summed in order by gate_gradient_kernel: no atomics, bit-equal for one configuration.
    dA' stays in fp32 until the row sum is taken; A is rounded to its storage dtype first, as the forward pass stores it.
    """
    tiles_n = tl.cdiv(F, BLOCK_N)
    tile_m, tile_n = swizzle(tl.program_id(0), num_row_tiles, tiles_n, GROUP_M)
    expert, row_start, row_end = locate_tile(offsets_ptr, tile_m, E, E_POW2, BLOCK_M)
    if expert >= E:
        return

    local_rows = tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    safe_rows = tl.minimum(local_rows, row_end - row_start - 1)
    columns_mask = columns < F
    tokens = tl.load(indices_ptr + row_start + safe_rows)
    lane = tl.arange(0, BLOCK_K)

    dy_ptrs = dy_ptr + widen(tokens, INDEX_64)[:, None] * stride_yt + lane[None, :] * stride_yd
    w2_base = w2_ptr + expert.to(tl.int64) * stride_w2e
    w2_ptrs = w2_base + widen(columns, INDEX_64)[None, :] * stride_w2f + widen(lane, INDEX_64)[:, None] * stride_w2d
    da = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    da, _ = main_loop(
        da,
        da,
        dy_ptrs,
        w2_ptrs,
        w2_ptrs,
        columns_mask,
        D,
        stride_yd,
        stride_w2d,
        stride_w2d,
        False,
        EVEN_N,
        EVEN_K,
        BLOCK_K,
        PRECISION,
    )

    row_mask = local_rows < row_end - row_start
    row_base = row_start.to(tl.int64)
    scale = tl.load(gates_ptr + row_base + local_rows, mask=row_mask, other=0.0)
    h1_base = h1_ptr + row_base * stride_h1
    h3_base = h3_ptr + row_base * stride_h3
    a_base = a_ptr + row_base * F
    ag_base = ag_ptr + row_base * F
    dh1_base = dh1_ptr + row_base * F
    dh3_base = dh3_ptr + row_base * F
    # One part of the columns at a time: the whole tile's H, A, dH at once do not fit in the registers beside dA'.
    partial = tl.zeros((BLOCK_M,), dtype=tl.float32)
    parts = split_columns(da, PARTS)
    for part in tl.static_range(PARTS):
        first = tile_n * BLOCK_N + part * (BLOCK_N // PARTS)
        partial += _hidden_part(
            parts[part],
            scale,
            first,
            row_mask,
            h1_base,
            h3_base,
            a_base,
            ag_base,
            dh1_base,
            dh3_base,
            F,
            stride_h1,
            stride_h3,
            ACTIVATION,
            GLU,
            SAVED_A,
        )
    tl.store(partials_ptr + (row_base + local_rows) * tiles_n + tile_n, partial, mask=row_mask)


@triton.jit
def _hidden_part(
    da,  # [BLOCK_M, columns] dA' of this part, fp32
    scale,  # [BLOCK_M] gates
    first,  # first column
    row_mask,
    h1_base,
    h3_base,
    a_base,
    ag_base,
    dh1_base,
    dh3_base,
    F,
    stride_h1,
    stride_h3,
    ACTIVATION: tl.constexpr,
    GLU: tl.constexpr,
    SAVED_A: tl.constexpr,
):
    """Stores dH and ag of some columns and returns the sum of dA' * A over them, per row."""
    rows = tl.arange(0, da.shape[0])[:, None]
    columns = first + tl.arange(0, da.shape[1])[None, :]
    mask = row_mask[:, None] & (columns < F)
    storage = ag_base.dtype.element_ty
    # Columns past F have dA' = 0 and are read as 0, so they add nothing to the row sum.
    gate = tl.load(h1_base + rows * stride_h1 + columns, mask=mask, other=0.0).to(tl.float32)
    up = gate
    if GLU:
        up = tl.load(h3_base + rows * stride_h3 + columns, mask=mask, other=0.0).to(tl.float32)
    if SAVED_A:
        activated = tl.load(a_base + rows * F + columns, mask=mask, other=0.0).to(tl.float32)
    else:
        activated = activate(gate, up, ACTIVATION).to(storage).to(tl.float32)
    partial = tl.sum(da * activated, 1)
    tl.store(ag_base + rows * F + columns, (scale[:, None] * activated).to(storage), mask=mask)
    d_gate, d_up = activate_gradient(gate, up, ACTIVATION)
    da *= scale[:, None]
    tl.store(dh1_base + rows * F + columns, (da * d_gate).to(storage), mask=mask)
    if GLU:
        tl.store(dh3_base + rows * F + columns, (da * d_up).to(storage), mask=mask)
    return partial


@triton.jit
def gate_gradient_kernel(
    partials_ptr,  # [P, N] fp32, N column tiles of backward_hidden
    dy_ptr,  # [T, D]; only read if BIAS
    indices_ptr,  # [P] int32
    offsets_ptr,  # [E + 1] int32
    b2_ptr,  # [E, D]; only read if BIAS
    dgates_ptr,  # [P] fp32 out
    D,
    N,
    stride_yt,
    stride_yd,
    stride_b2e,
    stride_b2d,
    E: tl.constexpr,
    E_POW2: tl.constexpr,
    BIAS: tl.constexpr,
    INDEX_64: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """dgates[p] = sum_n partials[p, n] (+ <dY[token p], b2[e]>, the part of a bias that stands behind the gate).

    Reads: P*N fp32, with a bias also P*D elements of dY. Writes: P fp32. Grid: row tiles bound. Owner: one program owns
    BLOCK_M rows and sums in order, all in fp32: bit-equal.
    """
    expert, row_start, row_end = locate_tile(offsets_ptr, tl.program_id(0), E, E_POW2, BLOCK_M)
    if expert >= E:
        return
    rows = row_start + tl.arange(0, BLOCK_M)
    row_mask = rows < row_end
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    for n in range(N):
        total += tl.load(partials_ptr + rows.to(tl.int64) * N + n, mask=row_mask, other=0.0)
    if BIAS:
        tokens = tl.load(indices_ptr + rows, mask=row_mask, other=0)
        dy_rows = dy_ptr + widen(tokens, INDEX_64)[:, None] * stride_yt
        b2_base = b2_ptr + expert.to(tl.int64) * stride_b2e
        for d in range(0, D, BLOCK_D):
            columns = d + tl.arange(0, BLOCK_D)
            inside = columns < D
            dy = tl.load(dy_rows + columns[None, :] * stride_yd, mask=row_mask[:, None] & inside[None, :], other=0.0)
            b2 = tl.load(b2_base + columns * stride_b2d, mask=inside, other=0.0)
            total += tl.sum(dy.to(tl.float32) * b2.to(tl.float32)[None, :], 1)
    tl.store(dgates_ptr + rows, total, mask=row_mask)
