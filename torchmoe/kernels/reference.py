"""The kernels of the expert MLP in plain PyTorch: any device, any floating dtype. The Triton backend mirrors these functions.

Letters: T tokens, K slots a token, P rows of the queue (T*K, or ``max_rows``), E experts, D model width, F expert width.
Rows at or past ``expert_token_offsets[E]`` do not exist: they are neither read nor written. Sums run in fp32 (fp64 for fp64
inputs) and are rounded once to the storage dtype. Every output element is written by one owner in a fixed order, so two runs
are bit-equal. Nothing here knows autograd; :mod:`torchmoe.kernels.ops` does.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from torchmoe.kernels.activations import activate, activate_backward

__all__ = [
    "backward_hidden",
    "bias_grad_rows",
    "build_queue",
    "combine",
    "down_projection",
    "input_grad",
    "up_projection",
    "weight_grad_rows",
]

Hidden = Tensor | tuple[Tensor, Tensor]
"""Pre-activations: one tensor [P, 2F] (gate columns first; [P, F] without a gated unit) or the pair (gate [P, F], up [P, F])."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 stays fp64, everything narrower is summed in fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def build_queue(expert_ids_TK: Tensor, num_experts: int, max_rows: int | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Group the (token, slot) pairs by expert; rows by expert ascending, then token, then slot.

    Ids outside [0, E) count as dropped. Rows that do not fit in ``max_rows`` are dropped too and reported by the flag.

    Returns:
        expert_token_indices_P: int32, token of each row; -1 where no row is.
        expert_token_offsets_E1: int32, expert e owns rows [offsets[e], offsets[e+1]).
        token_index_map_TK: int32, row of each slot; -1 = dropped.
        overflowed: bool [1].
    """
    T, K = expert_ids_TK.shape
    device, slots = expert_ids_TK.device, expert_ids_TK.numel()
    P = slots if max_rows is None else max_rows
    flat = expert_ids_TK.reshape(-1)
    # One spare bin behind the experts collects what is dropped; a stable sort keeps token and slot order inside a bin.
    key = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts).to(torch.int32)
    order = torch.argsort(key, stable=True)
    counts = torch.zeros(num_experts + 1, dtype=torch.int32, device=device)
    counts.scatter_add_(0, key.long(), torch.ones_like(key))
    offsets = torch.zeros(num_experts + 1, dtype=torch.int32, device=device)
    torch.cumsum(counts[:-1], 0, dtype=torch.int32, out=offsets[1:])
    row = torch.empty(slots, dtype=torch.int32, device=device)
    row[order] = torch.arange(slots, dtype=torch.int32, device=device)
    kept = offsets[-1]
    overflowed = (kept > P).reshape(1)
    token_index_map = torch.where((row < kept) & (row < P), row, -1).reshape(T, K)
    indices = torch.full((P,), -1, dtype=torch.int32, device=device)
    head = (order[:P] // max(K, 1)).to(torch.int32)
    exists = torch.arange(head.numel(), dtype=torch.int32, device=device) < kept
    indices[: head.numel()] = torch.where(exists, head, -1)
    return indices, offsets.clamp(max=P), token_index_map, overflowed


def up_projection(
    x_TD: Tensor,
    expert_token_indices_P: Tensor,
    expert_token_offsets_E1: Tensor,
    w1_EFD: Tensor,
    w3_EFD: Tensor | None,
    b1_EF: Tensor | None,
    b3_EF: Tensor | None,
    activation: str,
    save_hidden: bool,
    gate_only: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """H = X[indices] W^T + b per expert, A = act(H) from H rounded to the storage dtype.

    Returns:
        a_PF, and h_P2F (gated unit), h_PF (no gated unit, or ``gate_only``: the gate half alone) or None.
    """
    P, F = expert_token_indices_P.numel(), w1_EFD.size(1)
    glu, wide = w3_EFD is not None, accumulation_dtype(x_TD.dtype)
    a_PF = x_TD.new_empty(P, F)
    columns = (2 * F if glu and not gate_only else F) if save_hidden else 0
    h = x_TD.new_empty(P, columns) if save_hidden else None
    for e, start, stop in _segments(expert_token_offsets_E1):
        x_ND = x_TD.index_select(0, expert_token_indices_P[start:stop]).to(wide)
        gate = h[start:stop, :F] if h is not None else x_TD.new_empty(stop - start, F)
        _linear(x_ND, w1_EFD[e], b1_EF[e] if b1_EF is not None else None, gate)
        up = None
        if w3_EFD is not None:
            up = h[start:stop, F:] if h is not None and not gate_only else x_TD.new_empty(stop - start, F)
            _linear(x_ND, w3_EFD[e], b3_EF[e] if b3_EF is not None else None, up)
        activate(gate, up, activation, out=a_PF[start:stop])
    return a_PF, h


def down_projection(a_PF: Tensor, expert_token_offsets_E1: Tensor, w2_EDF: Tensor, b2_ED: Tensor | None) -> Tensor:
    """Y = A W2^T + b2 per expert, [P, D]."""
    y_PD = a_PF.new_empty(a_PF.size(0), w2_EDF.size(1))
    wide = accumulation_dtype(a_PF.dtype)
    for e, start, stop in _segments(expert_token_offsets_E1):
        _linear(a_PF[start:stop].to(wide), w2_EDF[e], b2_ED[e] if b2_ED is not None else None, y_PD[start:stop])
    return y_PD


def combine(y_PD: Tensor, token_index_map: Tensor, gates: Tensor | None, token_offsets_T1: Tensor | None = None) -> Tensor:
    """y[t] = sum over the slots of t, in slot order, of gate * row; a dropped slot (-1) adds nothing.

    ``token_index_map`` and ``gates`` are [T, K]; with ``token_offsets_T1`` they are [P'] and token t owns
    [token_offsets[t], token_offsets[t+1]) of them (ragged top-k, expert choice).
    """
    wide = accumulation_dtype(y_PD.dtype if gates is None else torch.promote_types(y_PD.dtype, gates.dtype))
    if token_offsets_T1 is None:
        T, slots = token_index_map.shape
    else:
        T = token_offsets_T1.numel() - 1
        counts = token_offsets_T1.diff()
        slots = int(counts.max()) if T else 0
    out = torch.zeros(T, y_PD.size(1), dtype=wide, device=y_PD.device)
    if y_PD.size(0) == 0:
        return out.to(y_PD.dtype)
    for k in range(slots):
        if token_offsets_T1 is None:
            rows, gate = token_index_map[:, k], None if gates is None else gates[:, k]
        else:
            slot = (token_offsets_T1[:-1] + k).clamp(max=token_index_map.numel() - 1)
            rows = torch.where(counts > k, token_index_map[slot], -1)
            gate = None if gates is None else gates[slot]
        part = y_PD.index_select(0, rows.clamp(min=0)).to(wide)
        if gate is not None:
            part.mul_(gate.to(wide)[:, None])
        out += part.masked_fill_((rows < 0)[:, None], 0.0)
    return out.to(y_PD.dtype)


def backward_hidden(
    dy_TD: Tensor,
    expert_token_indices_P: Tensor,
    expert_token_offsets_E1: Tensor,
    gates_P: Tensor,
    h: Hidden,
    w2_EDF: Tensor,
    b2_ED: Tensor | None,
    activation: str,
    a_PF: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One GEMM dA' = dO W2, then A = act(H), ds = <dA', A> (+ <dO, b2>), dH = s dA' act'(H), A' = s A.

    Moving W2 to the other side of <dO, A W2^T> = <dO W2, A> gives the gate gradient without keeping Y.

    Args:
        gates_P: gate of each row, fp32 or fp64.
        h: pre-activations in their storage dtype.
        a_PF: A where it was saved; else it is recomputed from ``h``, to the same bits.

    Returns:
        dh (shape of h, a pair becomes [P, 2F]), gated A' [P, F], dgates [P] in fp32 (fp64).
    """
    P, F = expert_token_indices_P.numel(), w2_EDF.size(2)
    wide = accumulation_dtype(dy_TD.dtype)
    gate_PF, up_PF = _halves(h, F)
    dh = dy_TD.new_empty(P, F if up_PF is None else 2 * F)
    ag_PF = dy_TD.new_empty(P, F)
    dgates_P = torch.empty(P, dtype=accumulation_dtype(torch.promote_types(wide, gates_P.dtype)), device=dy_TD.device)
    for e, start, stop in _segments(expert_token_offsets_E1):
        dy_ND = dy_TD.index_select(0, expert_token_indices_P[start:stop]).to(wide)
        da_NF = torch.mm(dy_ND, w2_EDF[e].to(wide))
        gate = gate_PF[start:stop]
        up = up_PF[start:stop] if up_PF is not None else None
        a_NF = ag_PF[start:stop]
        if a_PF is None:
            activate(gate, up, activation, out=a_NF)
        else:
            a_NF.copy_(a_PF[start:stop])
        torch.linalg.vecdot(da_NF, a_NF.to(wide), out=dgates_P[start:stop]) if dgates_P.dtype == wide else dgates_P[
            start:stop
        ].copy_(torch.linalg.vecdot(da_NF, a_NF.to(wide)))
        if b2_ED is not None:
            dgates_P[start:stop] += torch.mv(dy_ND, b2_ED[e].to(wide))
        s_N1 = gates_P[start:stop].to(wide)[:, None]
        da_NF.mul_(s_N1)
        activate_backward(
            gate, up, da_NF, activation, out_gate=dh[start:stop, :F], out_up=dh[start:stop, F:] if up is not None else None
        )
        if a_NF.dtype == wide:
            a_NF.mul_(s_N1)
        else:
            a_NF.copy_(a_NF.to(wide).mul_(s_N1))
    return dh, ag_PF, dgates_P


def input_grad(dh: Tensor, expert_token_offsets_E1: Tensor, w1_EFD: Tensor, w3_EFD: Tensor | None) -> Tensor:
    """dX~ = dH W1 (gate columns) + dH W3 (up columns), [P, D]; summed per token by :func:`combine` without gates."""
    F, D = w1_EFD.shape[1:]
    wide = accumulation_dtype(dh.dtype)
    dxr_PD = dh.new_empty(dh.size(0), D)
    for e, start, stop in _segments(expert_token_offsets_E1):
        out = dxr_PD[start:stop]
        rows = dh[start:stop].to(wide)
        direct = out if out.dtype == wide else None
        dx_ND = torch.mm(rows[:, :F], w1_EFD[e].to(wide), out=direct) if direct is not None else rows[:, :F] @ w1_EFD[e].to(wide)
        if w3_EFD is not None:
            dx_ND.addmm_(rows[:, F:], w3_EFD[e].to(wide))
        if direct is None:
            out.copy_(dx_ND)
    return dxr_PD


def weight_grad_rows(
    left: Tensor,
    right: Tensor,
    left_indices_P: Tensor | None,
    right_indices_P: Tensor | None,
    expert_token_offsets_E1: Tensor,
    out: Tensor,
    accumulate: bool = True,
) -> Tensor:
    """out[e] (+)= left[rows of e]^T right[rows of e]; a given index list gathers the rows of that side in the reduction.

    dW1 = weight_grad_rows(dh, x, None, indices, ...), dW2 = weight_grad_rows(dy, a_gated, indices, None, ...).
    ``accumulate=False`` overwrites, with exact zeros for experts without rows. ``out`` [E, left columns, right columns] may be
    a strided view and of any floating dtype; it is rounded once.
    """
    wide = accumulation_dtype(left.dtype)
    if not accumulate:
        out.zero_()
    for e, start, stop in _segments(expert_token_offsets_E1):
        lhs = _rows(left, left_indices_P, start, stop).to(wide)
        rhs = _rows(right, right_indices_P, start, stop).to(wide)
        if out.dtype == wide:
            torch.addmm(out[e], lhs.t(), rhs, beta=1.0 if accumulate else 0.0, out=out[e])
        elif accumulate:
            out[e].copy_(torch.addmm(out[e].to(wide), lhs.t(), rhs))
        else:
            out[e].copy_(torch.mm(lhs.t(), rhs))
    return out


def bias_grad_rows(
    rows: Tensor,
    indices_P: Tensor | None,
    scale_P: Tensor | None,
    expert_token_offsets_E1: Tensor,
    out: Tensor,
    accumulate: bool = True,
) -> Tensor:
    """out[e] (+)= sum over the rows of e of scale * row: db1, db3 (no scale) and db2 = sum of gate * dO."""
    wide = accumulation_dtype(rows.dtype)
    if not accumulate:
        out.zero_()
    for e, start, stop in _segments(expert_token_offsets_E1):
        part = _rows(rows, indices_P, start, stop).to(wide)
        total = part.sum(0) if scale_P is None else torch.mv(part.t(), scale_P[start:stop].to(wide))
        out[e].copy_(out[e].to(wide) + total)
    return out


def _segments(offsets_E1: Tensor) -> Iterator[tuple[int, int, int]]:
    """(expert, first row, end row) of the experts that have rows."""
    bounds = offsets_E1.tolist()
    for e in range(len(bounds) - 1):
        if bounds[e + 1] > bounds[e]:
            yield e, bounds[e], bounds[e + 1]


def _rows(values: Tensor, indices_P: Tensor | None, start: int, stop: int) -> Tensor:
    return values[start:stop] if indices_P is None else values.index_select(0, indices_P[start:stop])


def _halves(h: Hidden, F: int) -> tuple[Tensor, Tensor | None]:
    if isinstance(h, tuple):
        return h
    return (h, None) if h.size(1) == F else (h[:, :F], h[:, F:])


def _linear(x: Tensor, w: Tensor, b: Tensor | None, out: Tensor) -> None:
    """out = round(x w^T + b); x is already in the accumulation dtype."""
    w_t = w.to(x.dtype).t()
    if out.dtype == x.dtype:
        if b is None:
            torch.mm(x, w_t, out=out)
        else:
            torch.addmm(b.to(x.dtype), x, w_t, out=out)
    else:
        out.copy_(torch.mm(x, w_t) if b is None else torch.addmm(b.to(x.dtype), x, w_t))
