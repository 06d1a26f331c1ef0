"""Every operation of torchmoe as a torch.library operator: fake, autograd and autocast rules. The only door to the kernels.

Shapes of outputs depend on shapes of inputs alone, never on the routing, so the operators compile, capture and recompute.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from torchmoe.errors import ConfigError
from torchmoe.kernels import mlp, scheme
from torchmoe.kernels.backends import resolve
from torchmoe.kernels.blocks import accumulation_dtype
from torchmoe.kernels.scheme import WEIGHTS

__all__ = ["build_queue", "combine", "expert_mlp", "gather"]


def _refuse_forward_mode(what: str, *tensors: Tensor | None) -> None:
    # An operator without a forward-mode rule drops tangents under torch.func.jvp without a word.
    if torch.compiler.is_compiling():
        return
    if any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors):  # type: ignore[no-untyped-call]
        raise ConfigError(f"{what} has no forward-mode derivative; use reverse mode (backward, torch.autograd.grad)")


# ---- queue


@torch.library.custom_op("torchmoe::build_queue", mutates_args=())
def _build_queue(
    expert_ids_TK: Tensor, num_experts: int, max_rows: int | None, backend: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    built: tuple[Tensor, Tensor, Tensor, Tensor] = resolve(backend, expert_ids_TK.device).build_queue(
        expert_ids_TK, num_experts, max_rows
    )
    return built


@_build_queue.register_fake
def _(expert_ids_TK: Tensor, num_experts: int, max_rows: int | None, backend: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def make(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return expert_ids_TK.new_empty(shape, dtype=dtype)

    P = expert_ids_TK.numel() if max_rows is None else max_rows
    return make(P), make(num_experts + 1), make(*expert_ids_TK.shape), make(1, dtype=torch.bool)


def build_queue(
    expert_ids_TK: Tensor, num_experts: int, max_rows: int | None = None, backend: str = "auto"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See :func:`torchmoe.kernels.reference.build_queue`."""
    built: tuple[Tensor, Tensor, Tensor, Tensor] = torch.ops.torchmoe.build_queue(expert_ids_TK, num_experts, max_rows, backend)
    return built


# ---- gather and combine, for expert loops of the user


@torch.library.custom_op("torchmoe::gather", mutates_args=())
def _gather(x_TD: Tensor, tokens: Tensor, offsets: Tensor, index_map: Tensor, token_offsets: Tensor | None) -> Tensor:
    if x_TD.size(0) == 0:
        return x_TD.new_zeros(tokens.numel(), x_TD.size(1))
    rows = x_TD.index_select(0, tokens.clamp(min=0))
    return rows.masked_fill_((tokens < 0)[:, None], 0.0)


@_gather.register_fake
def _(x_TD: Tensor, tokens: Tensor, offsets: Tensor, index_map: Tensor, token_offsets: Tensor | None) -> Tensor:
    return x_TD.new_empty(tokens.numel(), x_TD.size(1))


@torch.library.custom_op("torchmoe::combine", mutates_args=())
def _combine(
    y_PD: Tensor, gates: Tensor | None, tokens: Tensor, offsets: Tensor, index_map: Tensor, token_offsets: Tensor | None
) -> Tensor:
    out: Tensor = resolve("auto", y_PD.device).combine(y_PD, index_map, gates, token_offsets)
    return out


@_combine.register_fake
def _(
    y_PD: Tensor, gates: Tensor | None, tokens: Tensor, offsets: Tensor, index_map: Tensor, token_offsets: Tensor | None
) -> Tensor:
    T = index_map.size(0) if token_offsets is None else token_offsets.numel() - 1
    return y_PD.new_empty(T, y_PD.size(1))


def _gather_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[1:])


def _gather_backward(ctx: Any, d_PD: Tensor) -> tuple[Any, ...]:
    return _combine(d_PD, None, *ctx.saved_tensors), None, None, None, None


def _combine_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    y_PD, gates, *index = inputs
    keep_y = gates is not None and ctx.needs_input_grad[1]
    ctx.save_for_backward(y_PD if keep_y else None, gates, *index)


def _combine_backward(ctx: Any, d_TD: Tensor) -> tuple[Any, ...]:
    y_PD, gates, *rest = ctx.saved_tensors
    index = scheme.Index(*rest)
    d_PD = _gather(d_TD, *index)
    if gates is None:
        return d_PD, None, None, None, None, None
    wide = torch.promote_types(accumulation_dtype(d_TD.dtype), accumulation_dtype(gates.dtype))
    dgates = None
    if ctx.needs_input_grad[1]:
        exists = index.tokens >= 0
        ds_P = torch.where(exists[:, None], y_PD, 0).to(wide).mul(d_PD.to(wide)).sum(1)
        dgates = scheme.slots_of_rows(ds_P, index, gates.dtype)
    dy = (d_PD.to(wide) * scheme.rows_of_slots(gates, index)[:, None]).to(d_PD.dtype) if ctx.needs_input_grad[0] else None
    return dy, dgates, None, None, None, None


_gather.register_autograd(_gather_backward, setup_context=_gather_context)
_combine.register_autograd(_combine_backward, setup_context=_combine_context)


def gather(x_TD: Tensor, tokens: Tensor, offsets: Tensor, index_map: Tensor, token_offsets: Tensor | None = None) -> Tensor:
    """x of each row [P, D]; rows that do not exist are 0. Its gradient is :func:`combine` without gates."""
    _refuse_forward_mode("gather", x_TD)
    out: Tensor = torch.ops.torchmoe.gather(x_TD, tokens, offsets, index_map, token_offsets)
    return out


def combine(
    y_PD: Tensor,
    gates: Tensor | None,
    tokens: Tensor,
    offsets: Tensor,
    index_map: Tensor,
    token_offsets: Tensor | None = None,
) -> Tensor:
    """See :func:`torchmoe.kernels.reference.combine`; gates in the order of ``index_map``."""
    _refuse_forward_mode("combine", y_PD, gates)
    out: Tensor = torch.ops.torchmoe.combine(y_PD, gates, tokens, offsets, index_map, token_offsets)
    return out


# ---- the expert MLP


@torch.library.custom_op("torchmoe::expert_mlp", mutates_args=())
def _expert_mlp(
    x: Tensor,
    gates: Tensor,
    tokens: Tensor,
    offsets: Tensor,
    index_map: Tensor,
    token_offsets: Tensor | None,
    expert_indices: Tensor | None,
    w1: Tensor,
    w3: Tensor | None,
    w2: Tensor,
    b1: Tensor | None,
    b3: Tensor | None,
    b2: Tensor | None,
    activation: str,
    layout: str,
    save: str,
    chunk_tokens: int,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y and what ``save`` keeps of (gate, up, A); an empty tensor where it keeps nothing."""
    kernels = resolve(backend, x.device)
    index = scheme.Index(tokens, offsets, index_map, token_offsets)
    weights = scheme.weight_views(scheme.Weights(w1, w3, w2, b1, b3, b2), layout)
    parts = scheme.pieces(kernels, index, expert_indices, chunk_tokens)
    y, kept = mlp.forward_pieces(kernels, x, gates, parts, scheme.Problem(index, weights, activation, save))
    gate, up, a = (x.new_empty(0) if t is None else t for t in kept)
    return y, gate, up, a


@_expert_mlp.register_fake
def _(x: Tensor, gates: Tensor, tokens: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (w1, w3, w2), save = others[4:7], others[-3]
    P, F = tokens.numel(), w2.size(2)
    gated = w1.size(1) + (0 if w3 is None else w3.size(1)) > F
    kept = (save in ("half", "preact", "all"), gated and save in ("preact", "all"), save == "all")
    gate, up, a = (x.new_empty(P, F) if keep else x.new_empty(0) for keep in kept)
    return x.new_empty(x.size(0), w2.size(1)), gate, up, a


@torch.library.custom_op("torchmoe::expert_mlp_backward", mutates_args=())
def _expert_mlp_backward(
    dy: Tensor,
    x: Tensor | None,
    gates: Tensor,
    tokens: Tensor | None,
    offsets: Tensor,
    index_map: Tensor | None,
    token_offsets: Tensor | None,
    expert_indices: Tensor | None,
    w1: Tensor,
    w3: Tensor | None,
    w2: Tensor,
    b1: Tensor | None,
    b3: Tensor | None,
    b2: Tensor | None,
    gate: Tensor | None,
    up: Tensor | None,
    a: Tensor | None,
    needs: list[bool],
    activation: str,
    layout: str,
    save: str,
    chunk_tokens: int,
    backend: str,
) -> list[Tensor]:
    """Gradients of (x, gates, w1, w3, w2, b1, b3, b2); an empty tensor where ``needs`` says no."""
    kernels = resolve(backend, dy.device)
    given = scheme.Weights(w1, w3, w2, b1, b3, b2)
    weights = scheme.weight_views(given, layout)
    whole = scheme.Index(
        offsets.new_empty(0) if tokens is None else tokens,
        offsets,
        offsets.new_empty(0) if index_map is None else index_map,
        token_offsets,
    )
    parts = scheme.pieces(kernels, whole, expert_indices, chunk_tokens)
    several = len(parts) > 1
    # One piece writes the gradient once, in the weight's dtype; several add up in the accumulation dtype.
    grads = {
        name: (torch.zeros if several else torch.empty)(
            w.shape, dtype=accumulation_dtype(w.dtype) if several else w.dtype, device=w.device
        )
        for name, w, need in zip(WEIGHTS, given, needs[2:], strict=True)
        if need and w is not None
    }
    dx, dgates = mlp.backward_pieces(
        kernels,
        dy,
        x,
        gates,
        parts,
        scheme.Problem(whole, weights, activation, save),
        scheme.Hiddens(gate, up, a),
        need_x=needs[0],
        grads=grad_views(grads, layout),
        accumulate=False,
    )
    found = [dx, dgates if needs[1] else None]
    found += [grads[name].to(w.dtype) if w is not None and name in grads else None for name, w in given._asdict().items()]
    return [dy.new_empty(0) if t is None else t for t in found]


def grad_views(grads: dict[str, Tensor], layout: str) -> dict[str, Tensor]:
    """Gradient buffers by split-layout name."""
    if layout == "split":
        return grads
    some = next(iter(grads.values())) if grads else None
    if some is None:
        return {}
    filler = some.new_empty(0, 0, 0)
    cut = scheme.weight_views(
        scheme.Weights(grads.get("w1", filler), None, filler, grads.get("b1"), None, grads.get("b2")), layout
    )._asdict()
    out = {}
    for name, source in (("w1", "w1"), ("w3", "w1"), ("b1", "b1"), ("b3", "b1")):
        if source in grads and cut[name] is not None:
            out[name] = cut[name]
    for name in ("w2", "b2"):
        if name in grads:
            out[name] = grads[name]
    return out


@_expert_mlp_backward.register_fake
def _(dy: Tensor, x: Tensor | None, gates: Tensor, *others: Any) -> list[Tensor]:
    weights, needs = others[5:11], others[14]
    return [
        like.new_empty(like.shape) if need and like is not None else dy.new_empty(0)
        for like, need in zip((dy, gates, *weights), needs, strict=True)
    ]


def _expert_mlp_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    (x, gates, tokens, offsets, index_map, token_offsets, expert_indices, *weights) = inputs[:13]
    ctx.activation, ctx.layout, ctx.save, ctx.chunk_tokens, ctx.backend = inputs[13:]
    _, *hiddens = output
    ctx.mark_non_differentiable(*hiddens)
    ctx.set_materialize_grads(False)
    w1_or_w3 = ctx.needs_input_grad[7] or ctx.needs_input_grad[8]
    # x serves dW1, dW3 and the recomputation of H; with these weights frozen and H saved nobody reads it.
    keep_x = x if w1_or_w3 or ctx.save in ("input", "half") else None
    chunked = ctx.chunk_tokens > 0 and expert_indices is not None and expert_indices.size(0) > ctx.chunk_tokens
    index = (None, offsets, None, None, expert_indices) if chunked else (tokens, offsets, index_map, token_offsets, None)
    kept = (t if t.ndim == 2 else None for t in hiddens)
    ctx.save_for_backward(keep_x, gates, *index, *weights, *kept)


def _expert_mlp_backward_rule(ctx: Any, dy: Tensor | None, *_: Tensor | None) -> tuple[Any, ...]:
    if dy is None:
        return (None,) * 18
    x, gates, *rest = ctx.saved_tensors
    needs = [ctx.needs_input_grad[i] for i in (0, 1, 7, 8, 9, 10, 11, 12)]
    grads = _expert_mlp_backward(dy, x, gates, *rest, needs, ctx.activation, ctx.layout, ctx.save, ctx.chunk_tokens, ctx.backend)
    by_input = [g if need else None for g, need in zip(grads, needs, strict=True)]
    return (*by_input[:2], None, None, None, None, None, *by_input[2:], None, None, None, None, None)


_expert_mlp.register_autograd(_expert_mlp_backward_rule, setup_context=_expert_mlp_context)


def _no_second_derivative(ctx: Any, *grads: Any) -> Any:
    raise ConfigError("the expert MLP has no second derivative; differentiate its output once (no create_graph through it)")


_expert_mlp_backward.register_autograd(_no_second_derivative)


def _autocast_rule(device_type: str, key: str) -> Callable[..., Any]:
    """Under autocast x and the weights are computed in the autocast dtype; gates keep theirs (their gradient is fp32)."""

    def rule(x: Tensor, gates: Tensor, *args: Any) -> Any:
        dtype = torch.get_autocast_dtype(device_type)

        def cast(t: Any) -> Any:
            return t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() and t.dtype != torch.float64 else t

        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))):
            return torch.ops.torchmoe.expert_mlp(cast(x), gates, *(cast(a) for a in args))

    return rule


_LIBRARY = torch.library.Library("torchmoe", "FRAGMENT")  # type: ignore[no-untyped-call]
for _device, _key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
    _LIBRARY.impl("expert_mlp", _autocast_rule(_device, _key), _key)  # type: ignore[no-untyped-call]


def expert_mlp(
    x_TD: Tensor,
    gates: Tensor,
    index: scheme.Index,
    expert_indices: Tensor | None,
    weights: scheme.Weights,
    *,
    activation: str,
    layout: str,
    save: str,
    chunk_tokens: int = 0,
    backend: str = "auto",
) -> Tensor:
    """y [T, D] of the expert MLP with autograd; ``save="none"`` where no gradient will be asked."""
    _refuse_forward_mode("the expert MLP", x_TD, gates, *weights)
    y: Tensor = torch.ops.torchmoe.expert_mlp(
        x_TD, gates, *index, expert_indices, *weights, activation, layout, save, chunk_tokens, backend
    )[0]
    return y
