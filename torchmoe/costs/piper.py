"""The published formulas of Piper (arXiv 2605.05049), as printed: the "paper" mode of the planner.

Mixed precision: 16 bytes per parameter = 2 weight + 2 gradient + 4 master + 8 Adam moments. The printed equations leave out
embeddings, head, router and shared experts, keep the full score matrix (4 H b s^2) and divide only the expert activations by
EP, so ``batch`` is one GPU's batch in one term and the EP group's in the other. The exact mode (costs.memory) does not.
"""

from __future__ import annotations

from dataclasses import dataclass

from torchmoe.errors import ConfigError

__all__ = [
    "MIGRATION_BANDWIDTH",
    "PiperModel",
    "bubble_fraction",
    "exchange_time_bound",
    "expert_bytes",
    "family_params",
    "memory_1f1b",
    "memory_edp",
    "memory_spread",
    "memory_unsharded",
    "migration_bytes",
]

MIGRATION_BANDWIDTH = 50e9
"""B/s at which Table IV moves experts."""


@dataclass(frozen=True, kw_only=True)
class PiperModel:
    """d, L, E, k, H (heads), d_ffn and the batch (b sequences of s tokens) of the printed equations."""

    dim: int
    num_layers: int
    num_experts: int
    top_k: int
    num_heads: int
    expert_dim: int
    batch: float
    seq_len: int
    shared_experts: int = 0

    @property
    def attention_state(self) -> float:
        """64 d^2 bytes: 4 d^2 parameters."""
        return 64.0 * self.dim**2

    @property
    def expert_state(self) -> float:
        """48 d d_f bytes: the three matrices of one expert."""
        return 48.0 * self.dim * self.expert_dim

    @property
    def shared_state(self) -> float:
        """48 E_s d d_f bytes, replicated; the printed form has no shared experts (0 then)."""
        return self.shared_experts * self.expert_state

    def attention_activations(self, micro_batches: int = 1) -> float:
        """12 b s d + 4 b H s^2 bytes."""
        b = self.batch / micro_batches
        return 12 * b * self.seq_len * self.dim + 4 * b * self.num_heads * self.seq_len**2

    def expert_activations(self, ep: int = 1, micro_batches: int = 1) -> float:
        """2 b s k (3 d_f + d) / EP bytes."""
        tokens = self.batch / micro_batches * self.seq_len
        return 2 * tokens * self.top_k * (3 * self.expert_dim + self.dim) / ep


def memory_unsharded(model: PiperModel) -> float:
    """M_u = L [64 d^2 + 48 E d d_f + 12 b s d + 4 H b s^2 + 2 b s k (3 d_f + d)], bytes."""
    state = model.attention_state + model.shared_state + model.num_experts * model.expert_state
    return model.num_layers * (state + model.attention_activations() + model.expert_activations())


def memory_edp(model: PiperModel, *, ep: int) -> float:
    """M_edp: experts and their activations divided by EP, attention replicated, bytes per GPU."""
    state = model.attention_state + model.shared_state + model.num_experts / ep * model.expert_state
    return model.num_layers * (state + model.attention_activations() + model.expert_activations(ep))


def memory_1f1b(model: PiperModel, *, pp: int, ep: int, micro_batches: int, stage: int = 0) -> float:
    """M_1F1B(i): L/PP layers of state and the activations of PP - i micro-batches, bytes per GPU of stage i.

    Feasibility is judged on stage 0, which holds the most micro-batches.
    """
    if not 0 <= stage < pp:
        raise ConfigError(f"stage={stage} is outside the {pp} pipeline stages")
    if micro_batches < 1:
        raise ConfigError(f"micro_batches={micro_batches} must be at least 1")
    state = model.attention_state + model.shared_state + model.num_experts / ep * model.expert_state
    live = model.attention_activations(micro_batches) + model.expert_activations(ep, micro_batches)
    return model.num_layers / pp * (state + (pp - stage) * live)


def memory_spread(model: PiperModel, *, pp: int, ep: int, micro_batches: int) -> float:
    """dM = M(0) - M(PP-1) = L (PP-1)/PP x the activations of one micro-batch, bytes."""
    live = model.attention_activations(micro_batches) + model.expert_activations(ep, micro_batches)
    return model.num_layers * (pp - 1) / pp * live


def exchange_time_bound(model: PiperModel, *, ep: int, nic_bandwidth: float) -> float:
    """T_a2a >= 4 b s k d / (EP B_NIC), seconds per layer forward: dispatch and combine, k copies of 2 d bytes each.

    ``nic_bandwidth`` is one GPU's share of its node's NICs in B/s.
    """
    return 4 * model.batch * model.seq_len * model.top_k * model.dim / (ep * nic_bandwidth)


def expert_bytes(*, dim: int, expert_dim: int) -> int:
    """48 d d_f: bytes to move one expert (weights, gradients, master copy and both moments of three matrices)."""
    return 48 * dim * expert_dim


def migration_bytes(*, num_experts: int, dim: int, expert_dim: int, gpus: int = 8) -> float:
    """48 E d d_f / G: worst case of one layer per GPU (Table IV)."""
    return num_experts * expert_bytes(dim=dim, expert_dim=expert_dim) / gpus


def bubble_fraction(*, pp: int, micro_batches: int) -> float:
    """(PP-1) / (M + PP - 1): idle share of a 1F1B step."""
    return (pp - 1) / (micro_batches + pp - 1)


def family_params(*, dim: int, expert_dim: int, num_layers: int, num_experts: int, matrices: int) -> float:
    """L (4 d^2 + matrices x E d d_f): what the printed parameter counts are made of."""
    return num_layers * (4.0 * dim**2 + matrices * num_experts * dim * expert_dim)
