"""Splits a torchtitan MoE decoder into the stages of a placement.

The attention half of a block IS torchtitan's block with its ``forward`` replaced: whatever wraps the block still wraps the
half, and all its parameters keep their names. The routed experts become :class:`ExpertPart`, under the same names.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.protocols.module import Module, ModuleDict

from torchmoe.errors import ConfigError
from torchmoe.pipeline.runtime.stage import AttentionOutput, MicroBatch, Stages
from torchmoe.placement import Placement, Where
from torchmoe.router import Routing
from torchmoe.titan.expert_part import ExpertPart, LocalExperts

__all__ = ["BlockPlan", "attention_half", "block_plan", "split_model"]


@dataclass(frozen=True)
class BlockPlan:
    """Which blocks of a decoder make up which unit.

    Args:
        moe: block name of every MoE layer.
        dense: per MoE layer, the dense blocks just before it; one entry more for those before the head.
    """

    moe: tuple[str, ...]
    dense: tuple[tuple[str, ...], ...]


def block_plan(names: Sequence[str], is_moe: Sequence[bool]) -> BlockPlan:
    """Group the blocks of a decoder: a dense block belongs to the next MoE layer's attention unit, or to the head."""
    moe: list[str] = []
    dense: list[tuple[str, ...]] = []
    waiting: list[str] = []
    for name, routed in zip(names, is_moe, strict=True):
        if routed:
            moe.append(name)
            dense.append(tuple(waiting))
            waiting = []
        else:
            waiting.append(name)
    return BlockPlan(tuple(moe), (*dense, tuple(waiting)))


class _Elsewhere(Module):
    """Stands where the experts were: they live on F ranks."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts

    def forward(self, *args: Any) -> Tensor:
        raise RuntimeError("the routed experts of this layer live on FFN ranks; run the model through its runner")


def _by_sequence(
    fn: Callable[[Tensor, Any, Tensor | None], Tensor], h_TD: Tensor, lengths: Sequence[int], masks: Any, positions: Any
) -> Tensor:
    """``fn(h_BLD, masks, positions_BL)`` over runs of equally long sequences, back as [T, D]."""
    runs = [(n, len(list(same))) for n, same in groupby(n for n in lengths if n)]
    if masks is not None and len(runs) > 1:
        raise ConfigError(
            f"attention masks with sequences of lengths {list(lengths)}: one mask serves one length; pad the sequences, "
            "or use an attention without masks"
        )
    flat = None if positions is None else positions.reshape(-1)
    out, at = [], 0
    for length, count in runs:
        stop = at + length * count
        part = None if flat is None else flat[at:stop].view(count, length)
        out.append(fn(h_TD[at:stop].view(count, length, -1), masks, part).reshape(stop - at, -1))
        at = stop
    return torch.cat(out) if out else h_TD


def attention_half(
    block: Any, res_TD: Tensor, lengths: Sequence[int], masks: Any, positions: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(res_TD, x_TD, expert_ids_TK, gates_TK) of one MoE block: everything of it but the routed experts.

    Args:
        block: a torchtitan block with attention, attention_norm, ffn_norm and moe.
        res_TD: hidden states, sequence by sequence.
        lengths: tokens of each of these sequences.
        masks, positions: as torchtitan hands them to the block.
    """

    def attend(h_BLD: Tensor, mask: Any, position_BL: Tensor | None) -> Tensor:
        return block.attention(block.attention_norm(h_BLD), mask, position_BL)  # type: ignore[no-any-return]

    h_TD = res_TD
    if any(lengths):
        h_TD = res_TD + _by_sequence(attend, res_TD, lengths, masks, positions)
    x_TD = block.ffn_norm(h_TD)
    moe = block.moe
    gates_BLK, ids_BLK, _ = moe.router(x_TD[None], moe.expert_bias_E)
    ids_TK = ids_BLK[0]
    if block.training and torch.is_grad_enabled():
        with torch.no_grad():
            counts_E = torch.bincount(ids_TK.reshape(-1), minlength=moe.tokens_per_expert_E.numel())
            moe.tokens_per_expert_E.add_(counts_E)
    if moe.shared_experts is not None:
        h_TD = h_TD + moe.shared_experts(x_TD)
    return h_TD, x_TD, ids_TK, gates_BLK[0]


class _Local:
    """What of a micro-batch lives on this rank."""

    def __init__(self, placement: Placement, where: Where) -> None:
        self.placement, self.where = placement, where

    def lengths(self, mb: MicroBatch) -> tuple[int, ...]:
        where = self.where
        mine = self.placement.sequences(where.group, where.index, len(mb.lengths), where.replica)
        return mb.lengths[mine.start : mine.stop]


def _dense(blocks: Sequence[nn.Module], h_TD: Tensor, lengths: Sequence[int], mb: MicroBatch) -> Tensor:
    masks, positions = mb.kwargs.get("attention_masks"), mb.kwargs.get("positions")
    for block in blocks:
        if any(lengths):
            h_TD = _by_sequence(block, h_TD, lengths, masks, positions)
    return h_TD


class TitanAttention:
    """Attention unit of one MoE layer: the dense blocks before it, then the block's attention half."""

    def __init__(self, block: nn.Module, dense: Sequence[nn.Module], local: _Local) -> None:
        self.block, self.dense, self.local = block, tuple(dense), local

    def __call__(self, res_TD: Tensor, mb: MicroBatch) -> AttentionOutput:
        lengths = self.local.lengths(mb)
        h_TD = _dense(self.dense, res_TD, lengths, mb)
        masks, positions = mb.kwargs.get("attention_masks"), mb.kwargs.get("positions")
        res_TD, x_TD, ids_TK, gates_TK = self.block(h_TD, lengths, masks, positions)
        return AttentionOutput(res_TD, x_TD, Routing(ids_TK, gates_TK))


class TitanHead:
    """Trailing dense blocks, final norm, head and loss."""

    def __init__(self, model: Any, dense: Sequence[nn.Module], local: _Local, loss_fn: Callable[..., Any]) -> None:
        self.model, self.dense, self.local, self.loss_fn = model, tuple(dense), local, loss_fn

    def __call__(self, res_TD: Tensor, mb: MicroBatch) -> Tensor:
        h_TD = _dense(self.dense, res_TD, self.local.lengths(mb), mb)
        pred = self.model.norm(h_TD)[None]
        if not self.model._skip_lm_head:  # a chunked loss applies the head itself
            pred = self.model.lm_head(pred)
        loss: Tensor = self.loss_fn(pred, mb.target.reshape(1, -1), **mb.loss_kwargs)[0]
        return loss


def _refuse(model: Any, placement: Placement) -> None:
    names = list(model.layers)
    plan = block_plan(names, [getattr(b, "moe_enabled", False) for b in model.layers.values()])
    if not plan.moe:
        raise ConfigError(f"{type(model).__name__} has no MoE block; disaggregation needs at least one")
    if len(plan.moe) != placement.num_layers:
        raise ConfigError(
            f"the model has {len(plan.moe)} MoE layers, the placement {placement.num_layers}; build it from the model"
        )
    if placement.head != "attention":
        raise ConfigError(f"head={placement.head!r}: inside torchtitan the head runs on attention ranks; use head='attention'")
    if getattr(model, "enable_weight_tying", False) and placement.embedding_group != placement.head_group:
        raise ConfigError(
            f"tied embeddings: the embedding is on {placement.embedding_group} and the head on {placement.head_group}; "
            "untie them, or choose attention groups whose number divides the number of MoE layers"
        )
    for name in plan.moe:
        experts = model.layers[name].moe.routed_experts.inner_experts
        if type(experts) is not GroupedExperts:
            raise ConfigError(
                f"layers.{name}: experts of class {type(experts).__name__} may compute something else than torchtitan's "
                "GroupedExperts, which is what FFN ranks run; use GroupedExperts"
            )


def split_model(
    model: Any, placement: Placement, where: Where, *, loss_fn: Callable[..., Any]
) -> tuple[Any, Stages, Mapping[int, nn.Module]]:
    """This rank's part of ``model`` (a torchtitan Decoder, usually on the meta device) and its stages.

    ``model`` is taken apart and must not be used afterwards. Names of parameters and buffers stay those of the whole model.

    Returns:
        (part, stages, MoE blocks or local experts by MoE layer).

    Raises:
        ConfigError: the model cannot be split in this placement.
    """
    _refuse(model, placement)
    blocks = dict(model.layers.items())
    plan = block_plan(list(blocks), [b.moe_enabled for b in blocks.values()])
    if where.role == "ffn":
        experts = {
            layer: LocalExperts.take(
                blocks[name].moe.routed_experts.inner_experts,
                placement.local_experts(layer, where.index),
            )
            for layer, name in enumerate(plan.moe)
            if placement.ffn_group(layer) == where.group
        }
        part = ExpertPart({plan.moe[layer]: e for layer, e in experts.items()})
        return part, Stages(experts=experts), experts

    local = _Local(placement, where)
    keep: set[str] = set()
    attention = {}
    for layer, name in enumerate(plan.moe):
        block = blocks[name]
        if placement.attention_group(layer) != where.group:
            continue
        keep |= {name, *plan.dense[layer]}
        routed = block.moe.routed_experts
        routed.inner_experts = _Elsewhere(routed.inner_experts.num_experts)
        block.forward = types.MethodType(attention_half, block)
        attention[layer] = TitanAttention(block, [blocks[n] for n in plan.dense[layer]], local)
    head = None
    if placement.head_group == where.group:
        keep |= set(plan.dense[-1])
        head = TitanHead(model, [blocks[n] for n in plan.dense[-1]], local, loss_fn)
    else:
        model.norm = model.lm_head = None
    embedding = None
    if placement.embedding_group == where.group:

        def embedding(mb: MicroBatch) -> Tensor:
            return model.tok_embeddings(mb.inputs[0].reshape(1, -1))[0]  # type: ignore[no-any-return]
    else:
        model.tok_embeddings = None
    model.layers = ModuleDict({name: block for name, block in blocks.items() if name in keep})
    halves = {layer: stage.block for layer, stage in attention.items()}
    return model, Stages(attention=attention, embedding=embedding, head=head), halves
