"""The compute-communication roofline: intensity of both roles over the sequence length, and what binds before and after a split.

Intensity is FLOPs per byte on the network. Left of the turning point, peak FLOP/s over bytes/s, the network binds. A split gives
each role its own turning point: its GPUs' FLOP/s over its NICs' bytes/s (DisagMoE section 3.3 and 4.3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torchmoe.alloc.specs import ClusterSpec, Workload
from torchmoe.alloc.split import SplitCosts
from torchmoe.costs import disagmoe
from torchmoe.costs.flops import layer_flops
from torchmoe.costs.model import ModelShape
from torchmoe.costs.traffic import copies_leaving_node
from torchmoe.errors import ConfigError

__all__ = ["Point", "Roofline"]

Mode = Literal["exact", "paper"]


@dataclass(frozen=True)
class Point:
    """One role at one sequence length.

    Args:
        placement: "aggregated" (all GPUs share all NICs) or "split".
        intensity: FLOPs per byte on the network.
        turning_point: where compute and network balance, FLOPs per byte.
        ceiling: FLOP/s per GPU that the kernels reach; ``attained`` what is left by the network.
    """

    role: str
    placement: str
    seq_len: int
    intensity: float
    turning_point: float
    ceiling: float

    @property
    def bound(self) -> str:
        return "compute" if self.intensity >= self.turning_point else "network"

    @property
    def attained(self) -> float:
        return self.ceiling * min(1.0, self.intensity / self.turning_point)


@dataclass(frozen=True)
class Roofline:
    """Both roles of ``model`` on ``cluster``, for m attention and n FFN GPUs with their NICs.

    Args:
        mode: "exact" counts the products and the expected rows and uses achieved FLOP/s; "paper" uses the printed formulas,
            raw peaks and half of the NICs for each side.
        ep: expert ranks of the aggregated placement.
    """

    cluster: ClusterSpec
    model: ModelShape
    workload: Workload
    m: int
    n: int
    nics_a: float
    nics_f: float
    ep: int = 16
    mode: Mode = "exact"

    def __post_init__(self) -> None:
        if min(self.m, self.n) < 1 or min(self.nics_a, self.nics_f) <= 0:
            raise ConfigError(
                f"m={self.m}, n={self.n}, nics_a={self.nics_a}, nics_f={self.nics_f}: both sides need a GPU and a NIC"
            )

        if self.cluster.nics < 1:
            raise ConfigError(f"cluster {self.cluster.name!r} has no NIC: nothing crosses a network; give nics_per_node")

    def points(self, seq_len: int) -> list[Point]:
        """Attention and experts, aggregated and split, at one length."""
        return [self.point(r, p, seq_len) for p in ("aggregated", "split") for r in ("attention", "experts")]

    def point(self, role: str, placement: str, seq_len: int) -> Point:
        peak = self.cluster.gpu.peak(self.workload.dtype)
        band = self.cluster.nic_bandwidth * self.cluster.network_efficiency
        gpus, nics = (self.m, self.nics_a) if role == "attention" else (self.n, self.nics_f)
        if placement == "aggregated":
            gpus, nics = self.cluster.gpus, float(self.cluster.nics)
        if self.mode == "paper":
            shape = self.model
            one = disagmoe.turning_point(peak_flops=peak, bandwidth=self.cluster.nic_bandwidth)
            a, f = disagmoe.disaggregated_turning_points(one, m=self.m, n=self.n)
            kink = one if placement == "aggregated" else a if role == "attention" else f
            g = shape.num_heads / shape.num_kv_heads
            intensity = (
                disagmoe.intensity_attention(dim=shape.dim, gqa_group=g, seq_len=seq_len, top_k=shape.top_k)
                if role == "attention"
                else disagmoe.intensity_ffn(expert_dim=shape.expert_dim)
            )
            return Point(role, placement, seq_len, intensity, kink, peak)
        flops, ceiling = self._work(role, seq_len)
        return Point(role, placement, seq_len, flops / self._bytes(role, placement), ceiling * gpus / (band * nics), ceiling)

    def _work(self, role: str, seq_len: int) -> tuple[float, float]:
        """Forward FLOPs per token of a MoE layer and the FLOP/s that the kernels reach on them."""
        shape, w, gpu = self.model, self.workload, self.cluster.gpu
        peak = gpu.peak(w.dtype)
        f = layer_flops(shape, layer=shape.num_layers - 1, seq_len=seq_len, causal=w.causal)
        if role == "experts":
            tokens = w.micro_batch * seq_len
            return f.experts, peak * gpu.grouped_gemm(tokens * shape.top_k / shape.num_experts)
        seconds = f.scores / (peak * gpu.attention(seq_len)) + (f.attention - f.scores) / (peak * gpu.gemm(seq_len))
        return f.attention, f.attention / seconds

    def _bytes(self, role: str, placement: str) -> float:
        """Bytes per token in the busier direction of a forward: each role is charged one transfer (dispatch or combine)."""
        shape, w = self.model, self.workload
        if placement == "split":
            costs = SplitCosts(self.cluster, shape, w)
            t = costs.traffic(self.n, 1)
            return t.dispatch if role == "attention" else t.combine
        nodes = max(1, self.ep // self.cluster.gpus_per_node)
        per = min(self.ep, self.cluster.gpus_per_node)
        copies = copies_leaving_node(shape.num_experts, shape.top_k, nodes=nodes, ranks_per_node=per) if nodes > 1 else 0.0
        if not copies:
            raise ConfigError(f"ep={self.ep} stays in one node: no byte crosses the network; give an ep over several nodes")
        return copies * shape.dim * w.itemsize
