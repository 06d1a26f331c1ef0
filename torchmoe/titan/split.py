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
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torchtitan.protocols.module import Module, ModuleDict

from torchmoe.errors import ConfigError
from torchmoe.pipeline.runtime.ride import RideExperts
from torchmoe.pipeline.runtime.stage import AttentionOutput, ExpertStage, MicroBatch, RidingExpertStage, Stages
from torchmoe.placement import Placement, Residual, Where
from torchmoe.router import Routing
from torchmoe.titan.expert_part import ExpertPart, LocalExperts, expert_block, family_of

__all__ = ["BlockPlan", "attention_half", "block_plan", "refuse_head", "split_model"]


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

    if isinstance(masks, Mapping):  # one mask per kind of layer, as GPT-OSS has
        masks = masks[block.attn_mask_key]
    h_TD = res_TD
    if any(lengths):
        h_TD = res_TD + _by_sequence(attend, res_TD, lengths, masks, positions)
    x_TD = block.ffn_norm(h_TD)
    moe = block.moe
    gates_BLK, ids_BLK, _ = moe.router(x_TD[None], moe.expert_bias_E)
    if moe.shared_experts is not None:
        h_TD = h_TD + moe.shared_experts(x_TD)
    return h_TD, x_TD, ids_BLK[0], gates_BLK[0]


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
        if self.block.training and torch.is_grad_enabled():
            self._count(ids_TK)
        return AttentionOutput(res_TD, x_TD, Routing(ids_TK, gates_TK))

    @property
    def _times(self) -> int:
        """torchtitan's balancing hook halves the counts of a checkpointed block, which counts twice there: here it does not."""
        return 2 if isinstance(self.block, CheckpointWrapper) else 1

    @torch.no_grad()
    def _count(self, ids_TK: Tensor) -> None:
        """For the balancing bias; outside of the block, which activation checkpointing runs twice."""
        load_E: Tensor = self.block.moe.tokens_per_expert_E  # type: ignore[union-attr, assignment]
        load_E.add_(torch.bincount(ids_TK.reshape(-1), minlength=load_E.numel()), alpha=self._times)

    def load_E(self) -> Tensor:
        """Slots per expert on this rank since the last optimizer step."""
        load_E: Tensor = self.block.moe.tokens_per_expert_E  # type: ignore[union-attr, assignment]
        return load_E / self._times


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


def _refuse(model: Any, placement: Placement, plan: BlockPlan) -> None:
    if not plan.moe:
        raise ConfigError(f"{type(model).__name__} has no MoE block; disaggregation needs at least one")
    if len(plan.moe) != placement.num_layers:
        raise ConfigError(
            f"the model has {len(plan.moe)} MoE layers, the placement {placement.num_layers}; build it from the model"
        )
    refuse_head(
        placement, tied=getattr(model, "enable_weight_tying", False), trailing=[f"layers.{name}" for name in plan.dense[-1]]
    )
    for name in plan.moe:
        experts = model.layers[name].moe.routed_experts.inner_experts
        family_of(experts, f"layers.{name}")


def refuse_head(placement: Placement, *, tied: bool, trailing: Sequence[str]) -> None:
    """Refuse a head that cannot be where the placement wants it.

    Args:
        tied: embedding and head share their weights.
        trailing: names of the dense blocks after the last MoE layer.

    Raises:
        ConfigError: tied weights on two groups, or blocks with attention on an FFN group.
    """
    if tied and placement.embedding_group != placement.head_group:
        raise ConfigError(
            f"tied embeddings: the embedding is on {placement.embedding_group} and the head on {placement.head_group}; "
            "untie them, or choose head='attention' and a number of attention groups that divides the number of MoE layers"
        )
    if trailing and placement.head == "ffn":
        raise ConfigError(
            f"head='ffn' with dense blocks after the last MoE layer ({', '.join(trailing)}): they need positions and masks, "
            "which FFN ranks do not have; use head='attention'"
        )


def split_model(
    model: Any,
    placement: Placement,
    where: Where,
    *,
    loss_fn: Callable[..., Any],
    residual: Residual | None = None,
    save: str = "preact",
    wrap: Callable[[nn.Module], None] | None = None,
) -> tuple[Any, Stages, BlockPlan]:
    """This rank's part of ``model`` (a torchtitan Decoder, usually on the meta device) and its stages.

    ``model`` is taken apart and must not be used afterwards. Names of parameters and buffers stay those of the whole model.

    Args:
        loss_fn: (prediction, labels, **loss_kwargs) -> (loss, ...), for the head.
        residual: with "ride", ffn_norm is on both roles and the shared experts on FFN ranks.
        save: what the experts keep for backward.
        wrap: called with the part of an attention rank before its stages are made, to wrap its ``layers`` (activation
            checkpointing).

    Returns:
        (part, stages, which blocks make up which unit).

    Raises:
        ConfigError: the model cannot be split in this placement.
    """
    plan = block_plan(list(model.layers), [getattr(b, "moe_enabled", False) for b in model.layers.values()])
    _refuse(model, placement, plan)
    ride = residual == "ride"
    if where.role == "ffn":
        part, stages = _expert_rank(model, plan, placement, where, loss_fn, ride=ride, save=save)
    else:
        part, stages = _attention_rank(model, plan, placement, where, loss_fn, ride=ride, wrap=wrap)
    return part, stages, plan


def _expert_rank(
    model: Any, plan: BlockPlan, placement: Placement, where: Where, loss_fn: Callable[..., Any], *, ride: bool, save: str
) -> tuple[ExpertPart, Stages]:
    held = {}
    experts: dict[int, ExpertStage | RidingExpertStage] = {}
    for layer, name in enumerate(plan.moe):
        if placement.ffn_group(layer) != where.group:
            continue
        block = model.layers[name]
        owned = placement.local_experts(layer, where.index)
        local = LocalExperts(block.moe.routed_experts.inner_experts, owned, save=save)
        if ride:
            held[name] = expert_block(local, block.ffn_norm, block.moe.shared_experts)
            experts[layer] = RideExperts(local, block.ffn_norm, block.moe.shared_experts)
        else:
            held[name] = expert_block(local)
            experts[layer] = local
    if placement.head_group != where.group:
        return ExpertPart(held), Stages(experts=experts)
    part = ExpertPart(held, norm=model.norm, lm_head=model.lm_head)
    return part, Stages(experts=experts, head=TitanHead(part, (), _Local(placement, where), loss_fn))


def _attention_rank(
    model: Any,
    plan: BlockPlan,
    placement: Placement,
    where: Where,
    loss_fn: Callable[..., Any],
    *,
    ride: bool,
    wrap: Callable[[nn.Module], None] | None,
) -> tuple[Any, Stages]:
    mine = [layer for layer in range(len(plan.moe)) if placement.attention_group(layer) == where.group]
    has_head = placement.head_group == where.group
    keep = {name for layer in mine for name in (plan.moe[layer], *plan.dense[layer])}
    keep |= set(plan.dense[-1]) if has_head else set()
    for layer in mine:
        block = model.layers[plan.moe[layer]]
        routed = block.moe.routed_experts
        routed.inner_experts = _Elsewhere(routed.inner_experts.num_experts)
        if ride:
            block.moe.shared_experts = None  # they live on FFN ranks
        block.forward = types.MethodType(attention_half, block)
    model.layers = layers = ModuleDict({name: block for name, block in model.layers.items() if name in keep})
    if not has_head:
        model.norm = model.lm_head = None
    embedding = None
    if placement.embedding_group == where.group:

        def embedding(mb: MicroBatch) -> Tensor:
            return model.tok_embeddings(mb.inputs[0].reshape(1, -1))[0]  # type: ignore[no-any-return]
    else:
        model.tok_embeddings = None
    if wrap is not None:
        wrap(model)
    local = _Local(placement, where)
    attention = {layer: TitanAttention(layers[plan.moe[layer]], [layers[n] for n in plan.dense[layer]], local) for layer in mine}
    head = TitanHead(model, [layers[n] for n in plan.dense[-1]], local, loss_fn) if has_head else None
    return model, Stages(attention=attention, embedding=embedding, head=head)
