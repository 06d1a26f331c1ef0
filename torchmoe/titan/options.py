"""The ``disag`` section of a recipe, and what follows from it: placement, settings of the exchange, schedules. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torchtitan.config import TORCH_DTYPE_MAP

from torchmoe.comm.plan import Combine, Overflow, Plan, Sizes
from torchmoe.errors import ConfigError
from torchmoe.kernels.scheme import SAVE_MODES
from torchmoe.pipeline.action import Schedule
from torchmoe.pipeline.lower import lower
from torchmoe.pipeline.schedules.afpipe import AFPipeSchedule
from torchmoe.placement import Deadlines, Head, Placement, Residual

__all__ = ["DisagConfig", "exchange_options", "exchange_plan", "matching_groups", "placement_of", "schedules"]


@dataclass(kw_only=True, slots=True)
class DisagConfig:
    """The layout of a disaggregated run. Sizes are per group; see :class:`torchmoe.placement.Placement`."""

    attention: list[int] = field(default_factory=lambda: [1])
    """Ranks of each attention group."""

    ffn: list[int] = field(default_factory=lambda: [1])
    """Ranks of each FFN group."""

    replicas: int = 1
    """Whole attention/FFN pipelines; their gradients are summed."""

    head: Head = "attention"
    """Where final norm, head and loss run: on an attention group, or on the FFN group of the last layer (``ffn``)."""

    residual: Residual | None = None
    """How the residual travels between attention groups: ``local`` (one group), ``direct``, or ``ride`` on the rows to the
    experts, whose ranks then hold ffn_norm and the shared experts. Default: local or direct, by the number of groups."""

    combine: Combine = "partial"
    """Rows that come back: one per (token, FFN rank), or one per slot (``slots``: bit-equal under other owners of experts)."""

    sizes: Sizes = "exact"
    """Messages of exact size after counts on the host, or all of ``capacity`` rows (``fixed``)."""

    capacity: int | None = None
    """Rows per (attention rank, FFN rank) message with ``sizes="fixed"``."""

    overflow: Overflow = "raise"
    """Rows past the capacity: ``raise`` an error, ``drop`` them, or ``grow`` the message."""

    cycle: int | None = None
    """Micro-batches a group issues per unit before its next one, from 2p; default 4p."""

    weights_held: int = 0
    """k > 0: the experts' weight gradients are actions of their own, run where the group would wait, at most k held."""

    save: str = "preact"
    """What the experts keep for backward: ``input`` (recompute all), ``half``, ``preact`` or ``all``. Gradients are bit-equal."""

    shard_attention: bool = False
    """FSDP2 inside every attention group: its ranks hold shards of weights, gradients and optimizer states."""

    exchange_seconds: float = 60.0
    """Deadline of one message."""

    record: bool = False
    """Keep a log of every message sent."""


def placement_of(config: Any) -> Placement:
    """The placement of a DisagTrainer.Config: group sizes from ``disag``, layers and experts from the model.

    Raises:
        ConfigError: no MoE layer, layers with different numbers of experts, or sizes that the placement refuses.
    """
    moe = _moe_layers(config)
    experts = {m.num_experts for m in moe}
    if len(experts) > 1:
        raise ConfigError(f"MoE layers with {sorted(experts)} experts; all of them must have the same number")
    d = config.disag
    message = d.exchange_seconds
    return Placement(
        attention=d.attention,
        ffn=d.ffn,
        replicas=d.replicas,
        num_layers=len(moe),
        num_experts=experts.pop(),
        head=d.head,
        deadlines=Deadlines(exchange=message, step=5 * message, init=max(600.0, 10 * message)),
    )


def _moe_layers(config: Any) -> list[Any]:
    moe = [layer.moe for layer in config.model_spec.model.layers if getattr(layer, "moe", None) is not None]
    if not moe:
        raise ConfigError("the model has no MoE layer; disaggregation needs at least one")
    return moe


def exchange_options(disag: DisagConfig, placement: Placement) -> dict[str, Any]:
    """The settings of :class:`~torchmoe.comm.m2n.M2NExchange` that a recipe chooses."""
    return {
        "residual": disag.residual or placement.default_residual,
        "combine": disag.combine,
        "sizes": disag.sizes,
        "capacity": disag.capacity,
        "overflow": disag.overflow,
    }


def exchange_plan(config: Any, placement: Placement) -> Plan:
    """All settings of the exchange of a DisagTrainer.Config.

    Raises:
        ConfigError: a value or a combination that cannot work.
    """
    d, training = config.disag, config.training
    if d.sizes == "fixed" and d.capacity is None:
        sequences = -(-config.parallelism.pipeline_parallel_microbatch_size // (d.replicas * min(d.attention)))
        raise ConfigError(
            "disag.sizes='fixed' needs disag.capacity, the rows of one message; "
            f"{sequences * training.seq_len} hold every token of an attention rank's micro-batch"
        )
    if d.sizes == "exact" and d.overflow != "raise":
        raise ConfigError(
            f"disag.overflow={d.overflow!r} is for disag.sizes='fixed'; exact messages never overflow, leave it out"
        )
    if d.save not in SAVE_MODES:
        raise ConfigError(f"disag.save={d.save!r} is unknown; use one of {', '.join(SAVE_MODES)}")
    if d.shard_attention and (d.replicas > 1 or d.residual == "ride"):
        what = f"disag.replicas={d.replicas}" if d.replicas > 1 else "disag.residual='ride'"
        raise ConfigError(
            f"disag.shard_attention with {what}: gradients of a shard would have to be summed outside of its group, too; "
            "use larger attention groups and residual='local' or 'direct', or shard_attention=False"
        )
    top_k = {m.router.top_k for m in _moe_layers(config)}
    if len(top_k) > 1:
        raise ConfigError(f"MoE layers with top_k {sorted(top_k)}; all of them must have the same")
    dtype = TORCH_DTYPE_MAP[training.dtype]
    return Plan(placement, config.model_spec.model.dim, top_k.pop(), dtype, **exchange_options(d, placement))


def schedules(placement: Placement, disag: DisagConfig, num_microbatches: int) -> tuple[Schedule, Schedule]:
    """The lowered schedules of a training step and of an evaluation."""
    train = AFPipeSchedule(placement, num_microbatches, cycle=disag.cycle, weights_held=disag.weights_held)
    evaluate = AFPipeSchedule(placement, num_microbatches, cycle=disag.cycle, forward_only=True)
    counted = disag.sizes == "exact" or disag.overflow == "grow"
    residual = disag.residual or placement.default_residual
    return (
        lower(train, placement, residual=residual, fixed_sizes=not counted),
        lower(evaluate, placement, residual=residual, fixed_sizes=not counted),
    )


def matching_groups(param_groups: Sequence[Any], part: Any) -> list[Any]:
    """The torchtitan parameter groups of which ``part`` has parameters; the first pattern that matches a name takes it."""
    names = [name for name, p in part.named_parameters() if p.requires_grad]
    out = []
    for group in param_groups:
        taken = {name for name in names if re.search(group.pattern, name)}
        names = [name for name in names if name not in taken]
        if taken:
            out.append(group)
    return out
