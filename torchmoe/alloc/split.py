"""Times, traffic and memory of a disaggregated layout, from a cluster, a model and a workload: what the allocator chooses from.

Times are seconds per optimizer step on the busiest rank of a side, forward and backward, as if it were always busy.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from torchmoe.alloc.specs import ClusterSpec, Workload
from torchmoe.costs.flops import layer_flops, recompute_factor
from torchmoe.costs.memory import MemoryParts, attention_rank_memory, expert_rank_memory, live_units_af
from torchmoe.costs.model import ModelShape
from torchmoe.costs.traffic import LayerTraffic, layer_traffic, split_sizes
from torchmoe.errors import ConfigError
from torchmoe.placement import Residual

__all__ = ["SplitCosts"]

FLASH_BACKWARD = 2.5
"""Backward over forward of fused attention: five score products instead of two."""


@dataclass(frozen=True)
class SplitCosts:
    """Costs of splitting ``model`` over attention GPUs of ``cluster`` and FFN GPUs of ``ffn_cluster`` (default: the same).

    Args:
        residual: how the residual reaches the next attention group when there are several: "direct", or "ride" on the rows;
            then the shared experts and a second ffn_norm are on the expert ranks.
        cycle: micro-batches issued per chunk (AF-Pipe's G); None: 4p.
    """

    cluster: ClusterSpec
    model: ModelShape
    workload: Workload
    ffn_cluster: ClusterSpec | None = None
    residual: Residual = "direct"
    cycle: int | None = None

    @property
    def f_cluster(self) -> ClusterSpec:
        return self.ffn_cluster or self.cluster

    def rides(self, pa: int) -> bool:
        """Whether the residual rides (with one attention group it stays where it is)."""
        return self.residual == "ride" and pa > 1

    # ---- attention side
    def group_layers(self, p: int, j: int) -> list[int]:
        """MoE layers (counted from 0) of group j of p."""
        return list(range(j, self.model.num_moe_layers, p))

    def attention_seconds(self, sequences: float, *, layer: int, shared: bool = True) -> float:
        """Forward and backward of block ``layer`` (all blocks counted) for ``sequences`` whole sequences on one GPU, with its
        shared experts or without."""
        if sequences <= 0:
            return 0.0
        w, gpu = self.workload, self.cluster.gpu
        f = layer_flops(self.model, layer=layer, seq_len=w.seq_len, causal=w.causal)
        peak, tokens = gpu.peak(w.dtype), sequences * w.seq_len
        again = 1.0 if w.recompute == "full" else 0.0
        gemms = (f.attention - f.scores - (0.0 if shared else f.shared)) * tokens / (peak * gpu.gemm(tokens))
        scores = f.scores * tokens / (peak * gpu.attention(w.seq_len))
        return gemms * (3 + again) + scores * (1 + FLASH_BACKWARD + again)

    def head_seconds(self, sequences: float) -> float:
        """Forward and backward of the head for ``sequences`` sequences on one GPU."""
        w, gpu = self.workload, self.cluster.gpu
        tokens = sequences * w.seq_len
        if not tokens:
            return 0.0
        return 6 * self.model.dim * self.model.vocab_size * tokens / (gpu.peak(w.dtype) * gpu.gemm(tokens))

    def attention_group_seconds(self, p: int, m: int, *, even: bool = True) -> float:
        """One micro-batch through the busiest of p attention groups of m GPUs (dense layers and head where they are)."""
        w, shape = self.workload, self.model
        sequences = w.micro_batch / m if even else -(-w.micro_batch // m)
        shared = not self.rides(p)
        by_window = {
            i: self.attention_seconds(sequences, layer=shape.num_dense_layers + i, shared=shared)
            for i in range(len(shape.windows))
        }
        dense = sum(self.attention_seconds(sequences, layer=i) for i in range(shape.num_dense_layers))
        busiest = 0.0
        for j in range(p):
            t = sum(by_window[layer % len(shape.windows)] for layer in self.group_layers(p, j))
            t += dense if j == 0 else 0.0
            t += self.head_seconds(sequences) if j == shape.num_moe_layers % p else 0.0
            busiest = max(busiest, t)
        return busiest

    # ---- FFN side
    def expert_seconds(self, n: int, pa: int = 1) -> float:
        """Forward and backward of one layer's experts for one micro-batch on the busiest of n ranks; where the residual rides
        (pa attention groups), with the shared experts of a 1/n of the tokens."""
        w, shape, gpu = self.workload, self.model, self.f_cluster.gpu
        most = -(-shape.num_experts // n)
        share = most / shape.num_experts * w.imbalance
        flops = 2 * shape.matrices * shape.dim * shape.expert_dim * shape.top_k * w.tokens * share
        per_expert = w.tokens * shape.top_k / shape.num_experts
        factor = recompute_factor("none", save=w.save, matrices=shape.matrices)
        products = flops * factor / (gpu.peak(w.dtype) * gpu.grouped_gemm(per_expert))
        weights = most * shape.expert_params * w.precision.weight * factor / gpu.hbm_bandwidth
        shared = 0.0
        if self.rides(pa) and shape.shared_dim:
            tokens = w.tokens / n
            f = layer_flops(shape, layer=shape.num_layers - 1, seq_len=w.seq_len, causal=w.causal)
            shared = 3 * f.shared * tokens / (gpu.peak(w.dtype) * gpu.gemm(tokens))
        return max(products, weights) + shared

    # ---- network
    def traffic(self, n: int, pa: int) -> LayerTraffic:
        """Expected bytes per token and layer with n FFN ranks."""
        w, shape = self.workload, self.model
        residual: Residual = "local" if pa == 1 else self.residual
        return _traffic(shape.dim, shape.num_experts, shape.top_k, n, w.itemsize, residual)

    def wire_bytes(self, n: int, pa: int) -> tuple[float, float]:
        """Bytes per micro-batch and layer in the busier direction of the attention and of the FFN side."""
        t = self.traffic(n, pa)
        tokens = self.workload.tokens
        return tokens * max(t.attention_in, t.attention_out), tokens * max(t.ffn_in, t.ffn_out)

    def link(self, cluster: ClusterSpec) -> tuple[float, float]:
        """(bytes/s of one NIC, NICs per GPU) of the network between the sides: the fabric of the node where there is one node."""
        if self.cluster.nodes == 1 and self.ffn_cluster is None:
            return cluster.intra_bandwidth * cluster.network_efficiency, 1.0
        if cluster.nics_per_node < 1:
            raise ConfigError(f"cluster {cluster.name} has no NIC: its GPUs cannot reach the other pool; give nics_per_node")
        return cluster.nic_bandwidth * cluster.network_efficiency, cluster.nics_per_node / cluster.gpus_per_node

    # ---- memory
    def live_units(self, role: str, pa: int, pf: int, micro_batches: int) -> int:
        """Units in flight on the fullest group of a role."""
        return live_units_af(
            num_layers=self.model.num_moe_layers, pa=pa, pf=pf, role=role, cycle=self.cycle, micro_batches=micro_batches
        )

    def attention_memory(self, *, pa: int, pf: int, m: int, n: int, replicas: int = 1) -> MemoryParts:
        """The fullest rank of the attention groups: the first (embedding, dense layers) or the head's."""
        w, shape = self.workload, self.model
        live = self.live_units("attention", pa, pf, self.micro_batches(replicas))
        rows = self.traffic(n, pa).rows
        parts = []
        for j in {0, shape.num_moe_layers % pa}:
            parts.append(
                attention_rank_memory(
                    shape,
                    layers=len(self.group_layers(pa, j)),
                    dense_layers=shape.num_dense_layers if j == 0 else 0,
                    embedding=j == 0,
                    head=j == shape.num_moe_layers % pa,
                    tokens=-(-w.micro_batch // m) * w.seq_len,
                    live_units=live,
                    rows_per_token=rows,
                    precision=w.precision,
                    recompute=w.recompute,
                    optimizer_copies=m * replicas if w.shard_optimizer else 1,
                    shared=not self.rides(pa),
                    allowance=self.cluster.reserved_bytes,
                )
            )
        return max(parts, key=lambda part: part.total)

    def expert_memory(self, *, pa: int, pf: int, n: int, replicas: int = 1) -> MemoryParts:
        """The fullest rank of the FFN groups."""
        w, shape = self.workload, self.model
        held = split_sizes(shape.num_experts, n)
        share = held[0] / shape.num_experts * w.imbalance
        return expert_rank_memory(
            shape,
            layers=len(self.group_layers(pf, 0)),
            experts=held[0],
            rows=w.tokens * min(1.0, self.traffic(n, pa).rows / n * w.imbalance),
            pairs=w.tokens * shape.top_k * share,
            live_units=self.live_units("ffn", pa, pf, self.micro_batches(replicas)),
            precision=w.precision,
            save=w.save,
            optimizer_copies=replicas if w.shard_optimizer else 1,
            ride_tokens=w.tokens / n if self.rides(pa) else 0.0,
            allowance=self.f_cluster.reserved_bytes,
        )

    def micro_batches(self, replicas: int) -> int:
        """Micro-batches per step of one replica."""
        return max(1, self.workload.global_batch // self.workload.micro_batch // replicas)


@cache
def _traffic(dim: int, experts: int, k: int, n: int, itemsize: int, residual: Residual) -> LayerTraffic:
    return layer_traffic(
        dim=dim,
        num_experts=experts,
        top_k=k,
        ffn_ranks=n,
        itemsize=itemsize,
        residual=residual,
    )
