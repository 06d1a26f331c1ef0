"""Token-choice routing: which experts each token goes to, with which gates; and what keeps the experts balanced.

Balancing that is equal for every split into ranks and micro-batches: the selection bias (updated once a step from integer
counts) and the per-sequence loss. The loss over the global batch needs the counts of the whole batch before the first
backward, so it exists for own loops as two phases (:func:`load_counts`, then :func:`global_balance_loss`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import register_dataclass

from torchmoe.autocast import without_autocast
from torchmoe.errors import ConfigError, RoutingError, check_whole

__all__ = [
    "Routing",
    "TopKRouter",
    "global_balance_loss",
    "load_counts",
    "sequence_balance_loss",
    "updated_bias",
    "z_loss",
]


@dataclass(frozen=True)
class Routing:
    """The decision of a router for T tokens. It is data: recompute replays it, it is never decided twice.

    Args:
        expert_ids_TK: logical expert ids, int32 or int64; -1 is a dropped slot. Carries no gradient.
        gates_TK: weight of each slot, fp32 or wider; carries gradient.
        aux: scalar balancing loss of these tokens, already scaled, or None. Its gradient is taken with the gates'.
    """

    expert_ids_TK: Tensor
    gates_TK: Tensor
    aux: Tensor | None = None


# A pytree, so that torch.export and hooks that look for tensors in outputs (FSDP2) see into it.
register_dataclass(Routing, serialized_type_name="torchmoe.router.Routing")


class TopKRouter(nn.Module):
    """scores = softmax or sigmoid of x W^T; the K best experts; gates = their scores, normalised and scaled where asked.

    How published models are written: Qwen3 and Mixtral ``score="softmax", normalize=True``; GPT-OSS the same with
    ``linear_bias=True`` (softmax over the K best logits is the normalised softmax over all); DeepSeek-V3 ``score="sigmoid",
    normalize=True, scale=2.5, num_groups=8, top_groups=4`` with the selection bias; OLMoE ``score="softmax"``.

    Args:
        dim: D.
        num_experts: E.
        top_k: K.
        score: "softmax" or "sigmoid".
        normalize: divide the K gates by their sum (refused for K = 1: the gate would be 1 and the router would never learn).
        scale: factor on the gates, after normalisation.
        num_groups, top_groups: choose only among the best ``top_groups`` of ``num_groups`` equal groups of experts.
        group_score: a group's score: "top2" (sum of its two best, DeepSeek-V3) or "max" (its best, DeepSeek-V2).
        linear_bias: a bias on the logits (trained).
        selection_bias: keep ``expert_bias_E``, added to the scores for the choice only, never in the gates. The buffer stays
            fp32 when the module is cast to bf16 or fp16, whose steps are wider than ``rate``.
        sequence_loss: coefficient of the per-sequence balancing loss in ``Routing.aux``; 0 for none.
        device, dtype: of the weight.

    Raises:
        ConfigError: a value or a combination is refused.
    """

    expert_bias_E: Tensor | None

    def __init__(
        self,
        dim: int,
        num_experts: int,
        top_k: int,
        *,
        score: str = "softmax",
        normalize: bool = False,
        scale: float = 1.0,
        num_groups: int | None = None,
        top_groups: int | None = None,
        group_score: str = "top2",
        linear_bias: bool = False,
        selection_bias: bool = True,
        sequence_loss: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if score not in ("softmax", "sigmoid"):
            raise ConfigError(f"score={score!r} is unknown; use 'softmax' or 'sigmoid'")
        for name, value in (("dim", dim), ("num_experts", num_experts), ("top_k", top_k)):
            check_whole(name, value, 1, "give the sizes of the layer")
        if not math.isfinite(scale) or scale <= 0:
            raise ConfigError(f"scale={scale} must be finite and above 0, or no gate would teach the router; use 1.0 for none")
        if not math.isfinite(sequence_loss) or sequence_loss < 0:
            raise ConfigError(f"sequence_loss={sequence_loss} must be finite and not negative; use 0 for no loss")
        if top_k > num_experts:
            raise ConfigError(f"top_k={top_k} must be in [1, {num_experts}], the number of experts")
        if top_k == 1 and normalize:
            raise ConfigError(
                "top_k=1 with normalize=True makes every gate 1, so the router would never learn; use normalize=False"
            )
        if (num_groups is None) != (top_groups is None):
            raise ConfigError(f"num_groups={num_groups} and top_groups={top_groups} go together; give both or none")
        if group_score not in ("top2", "max"):
            raise ConfigError(f"group_score={group_score!r} is unknown; use 'top2' or 'max'")
        if num_groups is not None and top_groups is not None:
            if num_groups < 1 or num_experts % num_groups:
                raise ConfigError(f"num_groups={num_groups} must divide num_experts={num_experts}")
            size = num_experts // num_groups
            if not 1 <= top_groups <= num_groups or top_groups * size < top_k:
                raise ConfigError(
                    f"top_groups={top_groups} of {num_groups} groups of {size} experts must hold top_k={top_k}; raise top_groups"
                )
            if group_score == "top2" and size < 2:
                raise ConfigError(f"group_score='top2' needs 2 experts a group, and {num_groups} groups hold 1; use 'max'")
        self.dim, self.num_experts, self.top_k = dim, num_experts, top_k
        self.score, self.normalize, self.scale = score, normalize, scale
        self.num_groups, self.top_groups, self.group_score = num_groups, top_groups, group_score
        self.sequence_loss = sequence_loss
        self.weight_ED = nn.Parameter(torch.empty(num_experts, dim, device=device, dtype=dtype))
        self.bias_E = nn.Parameter(torch.empty(num_experts, device=device, dtype=dtype)) if linear_bias else None
        bias = torch.zeros(num_experts, dtype=torch.float32, device=device) if selection_bias else None
        self.register_buffer("expert_bias_E", bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform(-1/sqrt(D), 1/sqrt(D)), zero biases."""
        bound = 1.0 / math.sqrt(self.dim)
        nn.init.uniform_(self.weight_ED, -bound, bound)
        for bias in (self.bias_E, self.expert_bias_E):
            if bias is not None:
                nn.init.zeros_(bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TopKRouter:
        bias = self.expert_bias_E
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        now = self.expert_bias_E
        if bias is not None and now is not None and now.dtype in (torch.bfloat16, torch.float16):
            self.expert_bias_E = bias.to(now.device)
        return self

    def logits(self, x_TD: Tensor) -> Tensor:
        """x W^T + b, [T, E], multiplied and summed in fp32 (fp64) whatever the dtypes of x and W, also under autocast.

        A bf16 result would send about 5 % of the tokens to other experts.
        """
        if x_TD.ndim != 2 or x_TD.size(1) != self.dim:
            raise ConfigError(f"x {tuple(x_TD.shape)} must be [T, {self.dim}]; flatten batch and sequence, and check dim")
        if not x_TD.is_floating_point():
            raise ConfigError(f"x is {x_TD.dtype}; the rule is a floating dtype")
        if x_TD.device != self.weight_ED.device:
            raise ConfigError(f"x is on {x_TD.device} and the router on {self.weight_ED.device}; move one of them")
        wide = torch.float64 if torch.float64 in (x_TD.dtype, self.weight_ED.dtype) else torch.float32
        weight, bias = _local(self.weight_ED), _local(self.bias_E)
        with without_autocast(x_TD.device):
            out = x_TD.to(wide) @ weight.to(wide).t()
            return out if bias is None else out + bias.to(wide)

    def scores(self, logits_TE: Tensor) -> Tensor:
        """softmax or sigmoid of the logits."""
        return logits_TE.softmax(-1) if self.score == "softmax" else logits_TE.sigmoid()

    def select(self, scores_TE: Tensor) -> Tensor:
        """Ids [T, K] int32 of the K best experts by score + selection bias within the best groups, as torch.topk orders them."""
        choice = scores_TE.detach()
        if self.expert_bias_E is not None:
            choice = choice + self.expert_bias_E
        if self.num_groups is not None and self.top_groups is not None:
            groups = choice.reshape(choice.size(0), self.num_groups, -1)
            best = groups.topk(2, dim=-1).values.sum(-1) if self.group_score == "top2" else groups.amax(-1)
            kept = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, best.topk(self.top_groups, dim=-1).indices, True)
            choice = groups.masked_fill(~kept[..., None], float("-inf")).flatten(-2)
        return choice.topk(self.top_k, dim=-1).indices.to(torch.int32)

    def gates(self, scores_TE: Tensor, expert_ids_TK: Tensor) -> Tensor:
        """Gates [T, K] of given ids (differentiable); 0 for -1."""
        dropped = expert_ids_TK < 0
        picked = scores_TE.gather(-1, expert_ids_TK.clamp(min=0).long()).masked_fill(dropped, 0.0)
        if self.normalize:
            picked = picked / (picked.sum(-1, keepdim=True) + 1e-20)
        return picked if self.scale == 1.0 else picked * self.scale

    def forward(
        self,
        x_TD: Tensor,
        *,
        lengths: Sequence[int] | None = None,
        loss_weight: float | None = None,
        replay_TK: Tensor | None = None,
    ) -> Routing:
        """Route T tokens.

        Args:
            x_TD: tokens.
            lengths: tokens of each sequence in x, for the per-sequence loss; None: x is one sequence.
            loss_weight: what each sequence counts, normally 1 / (sequences of the whole step); None: 1 / (sequences in x).
            replay_TK: ids decided earlier (by another engine, or before recomputation); gates are computed for them.
        """
        logits_TE = self.logits(x_TD)
        scores_TE = self.scores(logits_TE)
        if replay_TK is None:
            ids_TK = self.select(scores_TE)
        else:
            ids_TK = self._replayed(replay_TK, x_TD)
        aux = None
        if self.sequence_loss:
            lengths = [x_TD.size(0)] if lengths is None else lengths
            weight = 1.0 / max(len(lengths), 1) if loss_weight is None else loss_weight
            aux = self.sequence_loss * weight * sequence_balance_loss(scores_TE, ids_TK, lengths)
        return Routing(ids_TK, self.gates(scores_TE, ids_TK), aux)

    def _replayed(self, ids_TK: Tensor, x_TD: Tensor) -> Tensor:
        if ids_TK.ndim != 2 or ids_TK.size(0) != x_TD.size(0):
            raise RoutingError(
                f"replay {tuple(ids_TK.shape)} does not fit x {tuple(x_TD.shape)}; pass the ids [T, K] of these tokens"
            )
        if ids_TK.is_floating_point() or ids_TK.is_complex() or ids_TK.dtype == torch.bool:
            raise RoutingError(f"replay is {ids_TK.dtype}; expert ids are integers, best int32")
        # On a device the range is not read: that would stop the host, and the gather there fails by itself.
        if ids_TK.device.type == "cpu" and ids_TK.numel() and int(ids_TK.max()) >= self.num_experts:
            raise RoutingError(f"replay has expert {int(ids_TK.max())} and there are {self.num_experts}; -1 drops a slot")
        return ids_TK

    @torch.no_grad()
    def update_bias(self, counts_E: Tensor, *, rate: float = 1e-3) -> None:
        """Move the selection bias once a step; ``counts_E`` are summed over all ranks and micro-batches of the step.

        Raises:
            ConfigError: the router has no selection bias.
        """
        if counts_E.shape != (self.num_experts,):
            raise ConfigError(f"counts {tuple(counts_E.shape)} must be [{self.num_experts}]; pass load_counts(ids, E)")
        if self.expert_bias_E is None:
            raise ConfigError("this router has selection_bias=False; there is no bias to update")
        if not 0 <= rate < math.inf:
            raise ConfigError(f"rate={rate} must be 0 or more, and finite; a usual one is 1e-3")
        self.expert_bias_E.copy_(updated_bias(self.expert_bias_E, counts_E, rate=rate))

    def extra_repr(self) -> str:
        groups = f", best {self.top_groups} of {self.num_groups} groups" if self.num_groups else ""
        return (
            f"dim={self.dim}, num_experts={self.num_experts}, top_k={self.top_k}, score={self.score!r}, "
            f"normalize={self.normalize}, scale={self.scale}{groups}"
        )


def load_counts(expert_ids_TK: Tensor, num_experts: int) -> Tensor:
    """int64 [E], slots of each expert; -1 counts nowhere. Integers, so sums over ranks and micro-batches are exact."""
    flat = expert_ids_TK.reshape(-1).long()
    bins = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=flat.device)
    return counts.scatter_add_(0, bins, torch.ones_like(bins))[:-1]


def updated_bias(bias_E: Tensor, counts_E: Tensor, *, rate: float = 1e-3) -> Tensor:
    """bias + rate * sign(mean load - load), with the mean of the step taken out (the loss-free balancing of DeepSeek-V3).

    A uniform factor on the counts (a forward that ran twice under activation checkpointing) changes nothing.
    """
    counts = counts_E.to(torch.float64)
    step = rate * torch.sign(counts.mean() - counts)
    return (bias_E + (step - step.mean()).to(bias_E.dtype)).to(bias_E.dtype)


def sequence_balance_loss(scores_TE: Tensor, expert_ids_TK: Tensor, lengths: Sequence[int]) -> Tensor:
    """Sum over sequences of sum_e f_e P_e: f_e = E/(K n) * slots of e, P_e = mean share of e (DeepSeek-V3, equation 17).

    Scores are normalised over the experts first. Uniform routing gives exactly 1 per sequence, for every K.
    """
    if sum(lengths) != scores_TE.size(0):
        raise ConfigError(
            f"lengths sum to {sum(lengths)} and there are {scores_TE.size(0)} tokens; pass the lengths of these sequences"
        )
    E = scores_TE.size(1)
    share_TE = scores_TE / scores_TE.sum(-1, keepdim=True)
    total = scores_TE.new_zeros(())
    for share, ids in zip(torch.split(share_TE, list(lengths)), torch.split(expert_ids_TK, list(lengths)), strict=True):
        if share.size(0):
            slots = load_counts(ids, E).to(share.dtype)
            total = total + (slots * (E / ids.numel())).dot(share.mean(0))
    return total


def global_balance_loss(scores_TE: Tensor, counts_E: Tensor, num_tokens: int, *, top_k: int) -> Tensor:
    """This rank's part of sum_e f_e P_e over a whole batch; the parts of all ranks and micro-batches add up to the loss.

    Args:
        scores_TE: scores of this rank's tokens (differentiable).
        counts_E: slots of each expert over the WHOLE batch, from :func:`load_counts` summed over ranks (phase one).
        num_tokens: tokens of the whole batch.
        top_k: K.

    A pipelined step starts backward before the last micro-batch was routed, so it cannot have ``counts_E`` in time: use the
    selection bias or the per-sequence loss there.
    """
    E = scores_TE.size(1)
    share_E = (scores_TE / scores_TE.sum(-1, keepdim=True)).sum(0)
    fraction_E = counts_E.to(share_E.dtype) * (E / (top_k * max(num_tokens, 1)))
    return fraction_E.dot(share_E) / max(num_tokens, 1)


def z_loss(logits_TE: Tensor, num_tokens: int) -> Tensor:
    """This rank's part of mean(logsumexp(logits)^2) over ``num_tokens`` tokens (ST-MoE, equation 5)."""
    return logits_TE.logsumexp(-1).square().sum() / max(num_tokens, 1)


def _local(parameter: Tensor | None) -> Tensor:
    # full_tensor, not the shard: every rank routes over all experts.
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter  # type: ignore[return-value]
