"""The whole expert MLP in plain PyTorch, block by block: what the reference backend runs for one call of the layer.

A block's gathered tokens, pre-activations and products stay in cache, so no [P, F] tensor exists besides what ``save`` keeps.
Every step is the one of :mod:`torchmoe.kernels.reference` on the same blocks, so both give the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchmoe.kernels.activations import activate
from torchmoe.kernels.blocks import GradSink, Scratch, blocks, cut, project, segments, store
from torchmoe.kernels.reference import combine, hidden_backward, hidden_block, input_grad_block, saved_hidden
from torchmoe.kernels.scheme import Hiddens, Index, Weights, rows_of_slots, slots_of_rows

__all__ = ["backward", "forward"]


def forward(x_TD: Tensor, gates: Tensor, index: Index, weights: Weights, activation: str, save: str) -> tuple[Tensor, Hiddens]:
    """See :func:`torchmoe.kernels.mlp.forward`."""
    P, F = index.tokens.numel(), weights.w2.size(2)
    columns = F if weights.w3 is None else 2 * F
    h = x_TD.new_empty(P, F if save == "half" else columns) if save in ("half", "preact", "all") else None
    a_PF = x_TD.new_empty(P, F) if save == "all" else None
    y_PD = x_TD.new_empty(P, weights.w2.size(1))
    scratch = Scratch(x_TD.device, x_TD.dtype)
    for e, rows in blocks(index.offsets):
        x_ND = scratch.gather("x", x_TD, index.tokens[rows])
        target = None if h is None or save == "half" else h[rows]
        h_NG = hidden_block(scratch, x_ND, e, weights.w1, weights.w3, weights.b1, weights.b3, target)
        if h is not None:
            store(h[rows], h_NG[:, : h.size(1)])
        a_NF = scratch.output("a", None if a_PF is None else a_PF[rows], x_ND.size(0), F)
        activate(h_NG, activation, out=a_NF)
        scratch.round_(a_NF)
        if a_PF is not None:
            store(a_PF[rows], a_NF)
        y_ND = scratch.output("y", y_PD[rows], x_ND.size(0), y_PD.size(1))
        project(a_NF, scratch.wide("w", weights.w2[e]), None if weights.b2 is None else weights.b2[e], y_ND)
        store(y_PD[rows], y_ND)
    return combine(y_PD, index.map, gates, index.token_offsets), Hiddens(h, a_PF)


def backward(
    dy_TD: Tensor,
    x_TD: Tensor | None,
    gates: Tensor,
    index: Index,
    weights: Weights,
    hiddens: Hiddens,
    activation: str,
    save: str,
    *,
    need_x: bool,
    grads: dict[str, Tensor],
    accumulate: bool,
) -> tuple[Tensor | None, Tensor]:
    """(dx or None, dgates in slot order); the gradients of the weights named in ``grads`` go there."""
    w = weights
    P, F = index.tokens.numel(), w.w2.size(2)
    columns = F if w.w3 is None else 2 * F
    scratch = Scratch(dy_TD.device, dy_TD.dtype)
    gates_P = rows_of_slots(gates, index)
    dgates_P = torch.empty(P, dtype=torch.promote_types(scratch.dtype, gates_P.dtype), device=dy_TD.device)
    dxr_PD = dy_TD.new_empty(P, w.w1.size(2)) if need_x else None
    sinks = {name: GradSink(out, accumulate, scratch, name) for name, out in grads.items()}
    reads_x = save in ("input", "half") or not sinks.keys().isdisjoint(("w1", "w3"))
    for e, segment in segments(index.offsets):
        for sink in sinks.values():
            sink.begin(e, segment)
        if segment.start == segment.stop:
            continue
        for rows in cut(segment):
            N = rows.stop - rows.start
            x_ND = scratch.gather("x", x_TD, index.tokens[rows]) if reads_x and x_TD is not None else scratch.take("x", 0, 0)
            if save == "input":
                h_NG = hidden_block(scratch, x_ND, e, w.w1, w.w3, w.b1, w.b3, None)
            elif save == "half":
                h_NG = scratch.take("h", N, columns)
                assert hiddens.h is not None and w.w3 is not None
                h_NG[:, :F] = hiddens.h[rows]
                project(x_ND, scratch.wide("w", w.w3[e]), None if w.b3 is None else w.b3[e], h_NG[:, F:])
                scratch.round_(h_NG)
            else:
                assert hiddens.h is not None
                h_NG = saved_hidden(scratch, hiddens.h, rows)
            dy_ND = scratch.gather("dy", dy_TD, index.tokens[rows])
            dh_NG = scratch.take("dh", N, columns)
            ag_NF = hidden_backward(
                scratch,
                dy_ND,
                h_NG,
                gates_P[rows],
                scratch.wide("w", w.w2[e]),
                None if w.b2 is None else w.b2[e],
                activation,
                a_NF=None if hiddens.a is None else hiddens.a[rows],
                out_dh=dh_NG,
                out_dgates=dgates_P[rows],
            )
            if dxr_PD is not None:
                input_grad_block(scratch, dh_NG, e, w.w1, w.w3, dxr_PD[rows])
            dgate_NF, dup_NF = dh_NG[:, :F], dh_NG[:, F:]
            for name, sink in sinks.items():
                if name == "w2":
                    sink.add_product(dy_ND, ag_NF)
                elif name == "b2":
                    sink.add_rows(dy_ND, gates_P[rows].to(scratch.dtype))
                elif name in ("w1", "w3"):
                    sink.add_product(dgate_NF if name == "w1" else dup_NF, x_ND)
                else:
                    sink.add_rows(dgate_NF if name == "b1" else dup_NF, None)
        for sink in sinks.values():
            sink.end(e)
    dx_TD = None if dxr_PD is None else combine(dxr_PD, index.map, None, index.token_offsets)
    return dx_TD, slots_of_rows(dgates_P, index, gates.dtype)
