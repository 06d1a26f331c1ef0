"""FusedExpertMLP: the grouped expert MLP, and the choice of what backward keeps (MoEBlaze, section 5, and below it)."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchmoe.autocast import autocast_enabled
from torchmoe.costs.experts import ExpertCosts
from torchmoe.dispatch import DispatchQueue
from torchmoe.errors import ConfigError, check_whole
from torchmoe.fused_grad import expert_mlp_into_grad
from torchmoe.kernels import mlp, ops, scheme
from torchmoe.kernels.activations import is_gated
from torchmoe.kernels.backends import BACKENDS, choose, resolve
from torchmoe.kernels.blocks import accumulation_dtype
from torchmoe.plan import ExpertPlan, tile_lines
from torchmoe.split_backward import ExpertSaved, ExpertWeightWork, grad_buffer

__all__ = ["ExpertSaved", "ExpertWeightWork", "FusedExpertMLP", "RankExperts"]

_NAMES = ("w1_EFD", "w3_EFD", "w2_EDF", "b1_EF", "b3_EF", "b2_ED")
_JOINT = {"w1_EFD": "w13_EGD", "b1_EF": "b13_EG"}


class FusedExpertMLP(nn.Module):
    """E expert MLPs over the rows of a :class:`DispatchQueue`, without a routed copy of the tokens.

    y[t] = sum over slots k of gates[t, k] * W2_e act(W1_e x[t] + b1, W3_e x[t] + b3) + b2, e the expert of the slot.

    Args:
        num_experts: E.
        dim: D.
        hidden_dim: F.
        activation: "swiglu", "geglu", "reglu", "clamped_swiglu" (gate and up), or "silu", "gelu", "relu2".
        bias: biases on all projections.
        save: what backward keeps besides indices and gates: "input" (x), "half" (x and the gate half of H), "preact" (x, H),
            "all" (x, H, A), or "auto" (the richest mode that fits ``save_budget``). Gradients are bit-equal in all of them.
        backend: "auto" (Triton on a GPU where installed, else the reference), "reference", "triton".
        chunk_tokens: compute in chunks of that many tokens, which bounds the transients; None for one chunk.
        layout: "split" (w1_EFD, w3_EFD), "concat" or "interleaved" (one w13_EGD, G = 2F: gate rows first, or in turn).
        fused_grad: the backward adds the weights' gradients to their fp32 (fp64) ``.grad`` itself instead of handing each dW to
            autograd. For loops that sum and reduce ``.grad`` themselves: hooks on the weights (DDP, FSDP) do not run.
        save_budget: for "auto": bytes this module may keep per forward, i.e. the rank's budget / (layers x units in flight).
        device, dtype: of the parameters.

    Raises:
        ConfigError: a value or a combination is refused.
    """

    def __init__(
        self,
        num_experts: int,
        dim: int,
        hidden_dim: int,
        *,
        activation: str = "swiglu",
        bias: bool = False,
        save: str = "preact",
        backend: str = "auto",
        chunk_tokens: int | None = None,
        layout: str = "split",
        fused_grad: bool = False,
        save_budget: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._setup(num_experts, dim, hidden_dim, activation, save, backend, chunk_tokens, layout, save_budget)
        self.fused_grad = fused_grad
        E, D, F, options = num_experts, dim, hidden_dim, {"device": device, "dtype": dtype}
        rows = F if layout == "split" else 2 * F
        self._own("w1_EFD", nn.Parameter(torch.empty(E, rows, D, **options)))  # type: ignore[arg-type]
        split_gate = self.gated and layout == "split"
        self._own("w3_EFD", nn.Parameter(torch.empty(E, F, D, **options)) if split_gate else None)  # type: ignore[arg-type]
        self._own("w2_EDF", nn.Parameter(torch.empty(E, D, F, **options)))  # type: ignore[arg-type]
        self._own("b1_EF", nn.Parameter(torch.empty(E, rows, **options)) if bias else None)  # type: ignore[arg-type]
        self._own("b3_EF", nn.Parameter(torch.empty(E, F, **options)) if bias and split_gate else None)  # type: ignore[arg-type]
        self._own("b2_ED", nn.Parameter(torch.empty(E, D, **options)) if bias else None)  # type: ignore[arg-type]
        self.reset_parameters()

    @classmethod
    def from_parameters(
        cls,
        w1_EFD: nn.Parameter,
        w2_EDF: nn.Parameter,
        w3_EFD: nn.Parameter | None = None,
        *,
        biases: tuple[nn.Parameter | None, nn.Parameter | None, nn.Parameter | None] = (None, None, None),
        activation: str = "swiglu",
        save: str = "preact",
        backend: str = "auto",
        chunk_tokens: int | None = None,
        layout: str = "split",
        fused_grad: bool = False,
        save_budget: int | None = None,
    ) -> FusedExpertMLP:
        """A module around parameters that exist already (e.g. torchtitan's GroupedExperts), without a copy.

        Args:
            w1_EFD: gate (or only) projection; with a joint layout w13 [E, 2F, D].
            biases: (b1_EF, b3_EF, b2_ED).
        """
        self = cls.__new__(cls)
        nn.Module.__init__(self)
        if w2_EDF.ndim != 3:
            raise ConfigError(f"w2_EDF {tuple(w2_EDF.shape)} must be [E, D, F]; stack the down projections of the experts")
        E, D, F = w2_EDF.shape
        self._setup(E, D, F, activation, save, backend, chunk_tokens, layout, save_budget)
        self.fused_grad = fused_grad
        for name, value in zip(_NAMES, (w1_EFD, w3_EFD, w2_EDF, *biases), strict=True):
            self._own(name, value)
        self._check_parameters()
        return self

    def _setup(
        self,
        num_experts: int,
        dim: int,
        hidden_dim: int,
        activation: str,
        save: str,
        backend: str,
        chunk_tokens: int | None,
        layout: str,
        save_budget: int | None,
    ) -> None:
        for name, value in (("num_experts", num_experts), ("dim", dim), ("hidden_dim", hidden_dim)):
            check_whole(name, value, 1, "give the size of the expert block")
        self.num_experts, self.dim, self.hidden_dim = num_experts, dim, hidden_dim
        self.activation, self.gated = activation, is_gated(activation)
        if save not in (*scheme.SAVE_MODES, "auto"):
            raise ConfigError(f"save={save!r} is unknown; use one of {', '.join(scheme.SAVE_MODES)}, auto")
        if save == "half" and not self.gated:
            raise ConfigError(f"save='half' keeps one half of a gated unit, and {activation!r} has none; use 'input' or 'preact'")
        if save == "auto" and save_budget is None:
            raise ConfigError("save='auto' needs save_budget, the bytes this module may keep per forward; pass it or name a mode")
        if backend not in BACKENDS:
            raise ConfigError(f"backend={backend!r} is unknown; use one of {', '.join(BACKENDS)}")
        if save_budget is not None:
            check_whole("save_budget", save_budget, 0, "it counts bytes; use None without save='auto'")
        if chunk_tokens is not None:
            check_whole("chunk_tokens", chunk_tokens, 1, "use None for one chunk")
        if layout not in scheme.LAYOUTS:
            raise ConfigError(f"layout={layout!r} is unknown; use one of {', '.join(scheme.LAYOUTS)}")
        if layout != "split" and not self.gated:
            raise ConfigError(f"layout={layout!r} joins gate and up, and {activation!r} has no gate; use layout='split'")
        self.save, self.backend, self.chunk_tokens, self.layout, self.save_budget = (
            save,
            backend,
            chunk_tokens,
            layout,
            save_budget,
        )

    def _own(self, name: str, value: nn.Parameter | None) -> None:
        self.register_parameter(name if self.layout == "split" else _JOINT.get(name, name), value)

    def _weight(self, name: str) -> nn.Parameter | None:
        found: nn.Parameter | None = getattr(self, name if self.layout == "split" else _JOINT.get(name, name))
        return found

    def _check_parameters(self) -> None:
        E, D, F = self.num_experts, self.dim, self.hidden_dim
        rows = F if self.layout == "split" else 2 * F
        want = {
            "w1_EFD": (E, rows, D),
            "w3_EFD": (E, F, D),
            "w2_EDF": (E, D, F),
            "b1_EF": (E, rows),
            "b3_EF": (E, F),
            "b2_ED": (E, D),
        }
        for name in _NAMES:
            value = self._weight(name)
            if value is not None and tuple(value.shape) != want[name]:
                raise ConfigError(
                    f"{name} is {tuple(value.shape)} and w2_EDF says {want[name]}; check the sizes and layout={self.layout!r}"
                )
        if (self._weight("w3_EFD") is not None) != (self.gated and self.layout == "split"):
            raise ConfigError(
                f"{self.activation!r} in layout {self.layout!r} {'needs' if self.gated else 'takes no'} w3; check both"
            )
        if self._weight("w3_EFD") is not None and (self._weight("b1_EF") is None) != (self._weight("b3_EF") is None):
            raise ConfigError("only one of b1_EF and b3_EF is given; gate and up have both a bias or none")

    def reset_parameters(self) -> None:
        """Uniform(-1/sqrt(fan_in), 1/sqrt(fan_in)) for weights (nn.Linear's rule), zeros for biases."""
        for name in _NAMES:
            value = self._weight(name)
            if value is None or value.is_meta:
                continue
            if name.startswith("b"):
                nn.init.zeros_(value)
            else:
                bound = 1.0 / math.sqrt(value.shape[-1])
                nn.init.uniform_(value, -bound, bound)

    def weights(self) -> scheme.Weights:
        """The parameters as local tensors in the module's own layout (differentiable).

        Raises:
            ConfigError: DTensors that are not whole experts of this rank.
        """
        found = [self._weight(n) for n in _NAMES]
        given = [w for w in found if w is not None]
        if any(isinstance(w, DTensor) for w in given):
            _check_sharding(given)
        return scheme.Weights(*(w.to_local() if isinstance(w, DTensor) else w for w in found))  # type: ignore[arg-type]

    def costs(self, top_k: int, *, dtype: torch.dtype | None = None) -> ExpertCosts:
        """The formulas of this block for K slots a token."""
        weight = self._weight("w2_EDF")
        assert weight is not None
        dtype = dtype or weight.dtype
        return ExpertCosts(
            num_experts=self.num_experts,
            dim=self.dim,
            hidden_dim=self.hidden_dim,
            top_k=top_k,
            gated=self.gated,
            bias=self._weight("b2_ED") is not None,
            element_size=dtype.itemsize,
            gate_size=accumulation_dtype(dtype).itemsize,
            weight_size=weight.dtype.itemsize,
        )

    def plan(self, tokens: int, *, top_k: int, dtype: torch.dtype | None = None) -> ExpertPlan:
        """Bytes kept, transients and FLOPs of one forward and backward over T tokens with K slots each; ``.explain()`` is text.

        Args:
            dtype: of the computation, where it is not the weights' (autocast).
        """
        weight = self._weight("w2_EDF")
        assert weight is not None
        costs = self.costs(top_k, dtype=dtype)
        name = choose(self.backend, weight.device)
        rows = min(tokens, self.chunk_tokens or tokens) * top_k
        return ExpertPlan(costs, tokens, self._mode(tokens, costs), name, self.chunk_tokens or 0, tile_lines(costs, name, rows))

    # ---- autograd form

    def forward(self, x_TD: Tensor, queue: DispatchQueue, gates_TK: Tensor) -> Tensor:
        """y [T, D] in the dtype of x (the autocast dtype under autocast).

        Args:
            x_TD: tokens, any strides.
            queue: the routing of these T tokens over this module's experts.
            gates_TK: weight of each slot ([P] in pair order for a queue from pairs); fp32 is best, any floating dtype works.
        """
        self._check_call(x_TD, queue, gates_TK)
        weights = self.weights()
        gates = queue.slot_gates(gates_TK)
        grad = torch.is_grad_enabled() and any(t.requires_grad for t in (x_TD, gates, *weights) if t is not None)
        slots = queue.token_index_map.numel()
        expert_indices = queue.token_expert_indices if self.chunk_tokens else None
        if self.fused_grad and grad:
            return self._into_grad(x_TD, gates, queue, expert_indices)
        return ops.expert_mlp(
            x_TD,
            gates,
            queue.index,
            expert_indices,
            weights,
            activation=self.activation,
            layout=self.layout,
            save=self._save_mode(x_TD, slots) if grad else "none",
            chunk_tokens=self.chunk_tokens or 0,
            backend=self.backend,
        )

    def _into_grad(self, x_TD: Tensor, gates: Tensor, queue: DispatchQueue, expert_indices: Tensor | None) -> Tensor:
        if torch.compiler.is_compiling():
            raise ConfigError("fused_grad=True writes .grad inside the backward, which torch.compile cannot trace; use False")
        device = x_TD.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x_TD.dtype
        with torch.no_grad():
            weights = scheme.Weights(*(None if w is None else w.detach().to(dtype) for w in self.weights()))  # type: ignore[arg-type]
        return expert_mlp_into_grad(
            x_TD.to(dtype),
            gates,
            queue.index,
            expert_indices,
            scheme.weight_views(weights, self.layout),
            list(self.parameters()),
            self.grad_views,
            activation=self.activation,
            save=self._save_mode(x_TD, queue.token_index_map.numel()),
            chunk_tokens=self.chunk_tokens or 0,
            backend=self.backend,
        )

    def _save_mode(self, x_TD: Tensor, slots: int) -> str:
        if self.save != "auto":
            return self.save
        T = x_TD.size(0)
        return self._mode(T, self.costs(max(1, slots // max(T, 1)), dtype=x_TD.dtype))

    def _mode(self, tokens: int, costs: ExpertCosts) -> str:
        """The save mode, or under "auto" the richest one that fits the budget ("input" where none does)."""
        if self.save_budget is None or self.save != "auto":
            return self.save
        modes = [m for m in reversed(scheme.SAVE_MODES) if self.gated or m != "half"]
        fitting = (m for m in modes if costs.saved_bytes(tokens, m) <= self.save_budget)  # type: ignore[operator]
        return next(fitting, "input")

    def _check_call(self, x_TD: Tensor, queue: DispatchQueue, gates: Tensor) -> None:
        if x_TD.ndim != 2 or x_TD.size(1) != self.dim:
            raise ConfigError(f"x {tuple(x_TD.shape)} must be [T, {self.dim}]; flatten batch and sequence, and check dim")
        if x_TD.size(0) != queue.num_tokens:
            raise ConfigError(
                f"x has {x_TD.size(0)} tokens and the queue {queue.num_tokens}; build the queue from the routing of this x"
            )
        if queue.num_experts != self._local_experts():
            raise ConfigError(
                f"the queue has {queue.num_experts} experts and this module {self._local_experts()}; "
                "map ids to local experts, -1 for others"
            )
        if not gates.is_floating_point():
            raise ConfigError(f"gates are {gates.dtype}; the rule is a floating dtype, best fp32")
        if not x_TD.is_floating_point():
            raise ConfigError(f"x is {x_TD.dtype}; the rule is a floating dtype")
        weight = self._weight("w2_EDF")
        assert weight is not None
        for name, t in (("gates", gates), ("the queue", queue.token_index_map), ("the weights", weight)):
            if t.device != x_TD.device:
                raise ConfigError(f"x is on {x_TD.device} and {name} on {t.device}; move them to one device")
        if not autocast_enabled(x_TD.device) and weight.dtype != x_TD.dtype:
            raise ConfigError(
                f"x is {x_TD.dtype} and the weights {weight.dtype}; convert one of them or run under torch.autocast"
            )
        if self.chunk_tokens is not None:
            if queue.token_offsets is not None:
                raise ConfigError(
                    f"chunk_tokens={self.chunk_tokens} cuts a [T, K] routing, not a list of pairs; use chunk_tokens=None"
                )
            if queue.num_rows != queue.token_index_map.numel():
                raise ConfigError(f"chunk_tokens={self.chunk_tokens} needs a queue without max_rows; leave one of them out")

    def _local_experts(self) -> int:
        weight = self._weight("w2_EDF")
        if isinstance(weight, DTensor):
            return weight.to_local().size(0)
        return self.num_experts

    # ---- split form, for a runner that schedules input and weight gradients apart

    def forward_saved(self, x_TD: Tensor, queue: DispatchQueue, gates_TK: Tensor) -> tuple[Tensor, ExpertSaved]:
        """y [T, D] and what :meth:`backward_input` needs. No autograd graph is built; the same bits as :meth:`forward`."""
        self._check_call(x_TD, queue, gates_TK)
        with torch.no_grad():
            kernels = resolve(self.backend, x_TD.device)
            gates = queue.slot_gates(gates_TK)
            expert_indices = queue.token_expert_indices if self.chunk_tokens else None
            parts = scheme.pieces(kernels, queue.index, expert_indices, self.chunk_tokens or 0)
            weights = scheme.weight_views(self.weights(), self.layout)
            save = self._save_mode(x_TD, queue.token_index_map.numel())
            problem = scheme.Problem(queue.index, weights, self.activation, save)
            y_TD, hiddens = mlp.forward_pieces(kernels, x_TD, gates, parts, problem)
        return y_TD, ExpertSaved(x_TD, gates, parts, hiddens, save, queue.pair_order)

    def backward_input(self, saved: ExpertSaved, dy_TD: Tensor) -> tuple[Tensor, Tensor, ExpertWeightWork]:
        """(dx [T, D], dgates like the gates, the weight gradients still to run). Call it once per ``forward_saved``."""
        if dy_TD.shape != saved.x_TD.shape:
            raise ConfigError(
                f"dy {tuple(dy_TD.shape)} and x {tuple(saved.x_TD.shape)} differ; pass the gradient of this unit's output"
            )
        if dy_TD.dtype != saved.x_TD.dtype:
            raise ConfigError(f"dy is {dy_TD.dtype} and this unit's output was {saved.x_TD.dtype}; convert dy")
        with torch.no_grad():
            kernels = resolve(self.backend, dy_TD.device)
            weights = scheme.weight_views(self.weights(), self.layout)
            work = ExpertWeightWork(self.grad_views, kernels, saved.x_TD, dy_TD)
            dxs, dgates = [], []
            for part in saved.parts:
                up, ds = mlp.backward_rows(
                    kernels,
                    dy_TD[part.tokens],
                    saved.x_TD[part.tokens],
                    saved.gates[part.tokens],
                    scheme.Problem(part.queue, weights, self.activation, saved.save),
                    scheme.take(saved.hiddens, part),
                )
                dxs.append(mlp.input_gradient(kernels, up, part.queue, weights))
                dgates.append(ds)
                work.rows.append((part, up))
            dx = dxs[0] if len(dxs) == 1 else torch.cat(dxs)
            ds = dgates[0] if len(dgates) == 1 else torch.cat(dgates)
            if saved.pair_order is not None:
                ds = torch.empty_like(ds).index_copy_(0, saved.pair_order, ds)
        return dx, ds, work

    def grad_views(self) -> dict[str, Tensor]:
        """The ``.grad`` of every trainable parameter as split-layout views by short name (w1, w3, ...), made at first use.

        New buffers are fp32 (fp64 for fp64 weights), zeros; an existing ``.grad`` is added to in its own dtype.
        """
        buffers = {}
        for name, short in zip(_NAMES, scheme.WEIGHTS, strict=True):
            parameter = self._weight(name)
            if parameter is not None and parameter.requires_grad:
                buffers[short] = grad_buffer(parameter)
        return ops.grad_views(buffers, self.layout)

    def extra_repr(self) -> str:
        kept = {
            "input": "x",
            "half": "x, gate half of H",
            "preact": "x, H",
            "all": "x, H, A",
            "auto": f"the most that fits {self.save_budget} bytes",
        }[self.save]
        return (
            f"num_experts={self.num_experts}, dim={self.dim}, hidden_dim={self.hidden_dim}, activation={self.activation!r}, "
            f"layout={self.layout!r}, backend={self.backend!r}, chunk_tokens={self.chunk_tokens}, "
            f"save={self.save!r} (keeps {kept})"
        )


def _check_sharding(weights: list[nn.Parameter]) -> None:
    """DTensor weights are whole experts: all sharded alike, over experts (dimension 0) only."""
    kinds = {w.placements if isinstance(w, DTensor) else None for w in weights}
    placements = next(iter(kinds))
    if len(kinds) > 1 or placements is None or any(p.is_partial() or (p.is_shard() and not p.is_shard(0)) for p in placements):
        text = ", ".join(sorted(str(k) for k in kinds))
        raise ConfigError(f"weights are placed as {text}: an expert must be whole on its rank; shard all of them by Shard(0)")


class RankExperts:
    """The experts of one rank as an ``ExpertStage``: logical ids in, the ones this rank owns are computed.

    Args:
        mlp: the rank's experts, in the order of ``owned_expert_ids``.
        owned_expert_ids: logical ids of the local experts.
        num_experts: logical experts of the layer.
    """

    def __init__(self, experts: FusedExpertMLP, owned_expert_ids: Iterable[int], num_experts: int) -> None:
        self.experts = experts
        self.num_experts = num_experts
        self._table: Tensor
        self.own(owned_expert_ids)

    def own(self, owned_expert_ids: Iterable[int]) -> None:
        """Change which logical expert each local slot holds (after a migration)."""
        owned = list(owned_expert_ids)
        if len(owned) != self.experts.num_experts:
            raise ConfigError(
                f"{len(owned)} expert ids for a module of {self.experts.num_experts} experts; give one id per local expert"
            )
        if len(set(owned)) != len(owned) or any(not 0 <= e < self.num_experts for e in owned):
            raise ConfigError(f"owned experts {owned} must be distinct and in [0, {self.num_experts}); check the placement")
        self.owned_expert_ids = tuple(owned)
        # One entry more than experts: ids outside the range (-1 among them) read the last one. Made on the host also where a
        # model is built under torch.device("meta"): it is data, not a parameter to be initialised later.
        table = [-1] * (self.num_experts + 1)
        for slot, expert in enumerate(owned):
            table[expert] = slot
        self._table = torch.tensor(table, dtype=torch.int32, device="cpu")

    def local_ids(self, ids_RK: Tensor) -> Tensor:
        """Local expert of each slot, int32; -1 where the slot is dropped or belongs to another rank."""
        if self._table.device != ids_RK.device:
            self._table = self._table.to(ids_RK.device)
        known = torch.where((ids_RK >= 0) & (ids_RK < self.num_experts), ids_RK, self.num_experts)
        return self._table.index_select(0, known.reshape(-1)).reshape(ids_RK.shape)

    def forward_saved(self, rows_RD: Tensor, ids_RK: Tensor, gates_RK: Tensor) -> tuple[Tensor, ExpertSaved]:
        """Partial sums [R, D] over this rank's experts, in the dtype of the rows, and what backward needs. R may be 0."""
        if ids_RK.shape != gates_RK.shape or ids_RK.ndim != 2 or ids_RK.size(0) != rows_RD.size(0):
            raise ConfigError(
                f"rows {tuple(rows_RD.shape)}, ids {tuple(ids_RK.shape)} and gates {tuple(gates_RK.shape)} "
                "do not belong together; pass [R, D], [R, K], [R, K]"
            )
        with torch.no_grad():
            local = self.local_ids(ids_RK)
            # On the host the number of kept slots is free to read, and the buffers are cut to it; a device would have to sync.
            rows = int((local >= 0).sum()) if local.device.type == "cpu" and self.experts.chunk_tokens is None else None
            queue = DispatchQueue.build(local, self.experts.num_experts, max_rows=rows, backend=self.experts.backend)
            return self.experts.forward_saved(rows_RD, queue, gates_RK)

    def backward_input(self, saved: ExpertSaved, dy_RD: Tensor) -> tuple[Tensor, Tensor, ExpertWeightWork]:
        """(dx [R, D], dgates [R, K], weight gradients to run later); dgates are 0 in slots of other owners."""
        return self.experts.backward_input(saved, dy_RD)
