"""Times and memory of a colocated strategy: PP stages of EP ranks, DP copies (Piper's mesh), 1F1B. Exact mode.

Inside a stage every GPU holds the stage's attention (replicated over the EP group) and its share of the experts; an EP group's
micro-batch is spread over its GPUs by whole sequences. Four all-to-alls per MoE layer and step direction pair.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from torchmoe.alloc.specs import ClusterSpec, Workload
from torchmoe.alloc.split import SplitCosts
from torchmoe.costs import piper
from torchmoe.costs.memory import (
    MemoryParts,
    attention_rank_memory,
    expert_rank_memory,
    live_units_1f1b,
)
from torchmoe.costs.model import ModelShape
from torchmoe.costs.traffic import Dedup, copies_leaving_node

__all__ = ["ColocatedCosts", "ExchangeTime", "StepParts"]

AllToAll = Literal["flat", "halo"]


@dataclass(frozen=True)
class ExchangeTime:
    """One all-to-all of a MoE layer, seconds: what latency, the node's fabric and the network take, and the sum that counts."""

    latency: float
    fabric: float
    network: float
    total: float


@dataclass(frozen=True)
class StepParts:
    """Seconds of one step of a colocated strategy on its busiest stage, by cause."""

    attention: float
    experts: float
    exchange: float
    exchange_latency: float
    hidden: float
    p2p: float
    bubble: float
    gradients: float

    @property
    def compute(self) -> float:
        return self.attention + self.experts

    @property
    def total(self) -> float:
        return self.compute + self.exchange - self.hidden + self.p2p + self.bubble + self.gradients


@dataclass(frozen=True)
class ColocatedCosts:
    """Costs of ``pp`` stages of ``ep`` ranks, ``dp`` copies.

    Args:
        all_to_all: "flat", every pair of ranks; or "halo", lanes of a node to the same lane of the others.
        overlap: "none" (blocking), or "ideal": communication hides behind compute as far as there is any.
        dedup: send one row per token and destination rank instead of one per (token, expert).
    """

    cluster: ClusterSpec
    model: ModelShape
    workload: Workload
    pp: int
    ep: int
    dp: int = 1
    all_to_all: AllToAll = "halo"
    overlap: Literal["none", "ideal"] = "none"
    dedup: bool = False

    @property
    def local_sequences(self) -> float:
        """Sequences of a micro-batch on one GPU."""
        return self.workload.micro_batch / self.ep

    @property
    def micro_batches(self) -> int:
        return max(1, self.workload.global_batch // (self.workload.micro_batch * self.dp))

    @property
    def split(self) -> SplitCosts:
        return SplitCosts(self.cluster, self.model, self.workload)

    def stage_layers(self, stage: int) -> range:
        """Blocks of a stage, sizes equal up to one, the longer ones first."""
        base, more = divmod(self.model.num_layers, self.pp)
        start = stage * base + min(stage, more)
        return range(start, start + base + (stage < more))

    # ---- communication
    def exchange(self, all_to_all: AllToAll | None = None, *, one_node: bool = False) -> ExchangeTime:
        """One all-to-all (dispatch or combine) of one layer and micro-batch; ``one_node`` pretends that EP fits in a node."""
        c, shape, ep = self.cluster, self.model, self.ep
        if ep == 1:
            return ExchangeTime(0.0, 0.0, 0.0, 0.0)
        per = c.gpus_per_node
        lanes = ep if one_node else min(per, ep)
        nodes = 1 if one_node else -(-ep // per)
        token = self.local_sequences * self.workload.seq_len * shape.dim * self.workload.itemsize
        dedup: Dedup = "rank" if self.dedup else "flat"
        k = shape.top_k
        remote = copies_leaving_node(shape.num_experts, k, nodes=nodes, ranks_per_node=lanes, dedup=dedup) if nodes > 1 else 0.0
        everything = copies_leaving_node(shape.num_experts, k, nodes=ep, ranks_per_node=1, dedup=dedup)
        crossing = -(-nodes // (c.nodes_per_switch or nodes)) > 1
        nic = c.nic_share * (c.cross_switch_share if crossing else 1.0)
        hop = c.nic_latency + (c.cross_switch_latency if crossing else 0.0)
        network = token * remote / nic if remote else 0.0  # a node alone needs no NIC
        local = token * (everything - remote) / (c.intra_bandwidth * c.network_efficiency)
        if (all_to_all or self.all_to_all) == "flat":
            latency = (lanes - 1) * c.intra_latency + (nodes - 1) * lanes * hop
            return ExchangeTime(latency, local, network, latency + max(local, network))
        # I (node-local) beside II -> III: waves between lanes, then redistribution of what arrived
        spread = token * remote * (1 - 1 / lanes) / (c.intra_bandwidth * c.network_efficiency)
        first = (lanes - 1) * c.intra_latency + local
        later = (nodes - 1) * hop + network + ((lanes - 1) * c.intra_latency + spread if nodes > 1 else 0.0)
        latency = max((lanes - 1) * c.intra_latency, (nodes - 1) * hop + (lanes - 1) * c.intra_latency * (nodes > 1))
        return ExchangeTime(latency, local + spread, network, max(first, later))

    def p2p_seconds(self) -> float:
        """One stage boundary, one direction, one micro-batch: the hidden states of a GPU's tokens over its NIC share."""
        if self.pp == 1:
            return 0.0
        c = self.cluster
        bytes_ = self.local_sequences * self.workload.seq_len * self.model.dim * self.workload.itemsize
        inside = self.pp * self.ep <= c.gpus_per_node
        band = c.intra_bandwidth * c.network_efficiency if inside else c.nic_share
        return bytes_ / band + (c.intra_latency if inside else c.nic_latency)

    def gradient_seconds(self) -> float:
        """Ring all-reduce of the fullest stage's gradients: attention over EP x DP, experts over DP."""
        c, shape, w = self.cluster, self.model, self.workload
        layers = len(self.stage_layers(0))
        attention = layers * shape.attention_side_params + max(shape.embedding_params, shape.head_params)
        experts = layers * shape.num_experts / self.ep * shape.expert_params

        def ring(params: float, ranks: int) -> float:
            band = c.intra_bandwidth * c.network_efficiency if ranks <= c.gpus_per_node else c.nic_share
            return 2 * (ranks - 1) / ranks * params * w.precision.grad / band if ranks > 1 else 0.0

        return ring(attention, self.ep * self.dp) + ring(experts, self.dp)

    # ---- time
    def stage_compute(self, stage: int) -> tuple[float, float]:
        """(attention side, experts) of one micro-batch, forward and backward, seconds."""
        s, shape = self.split, self.model
        attention = sum(s.attention_seconds(self.local_sequences, layer=i) for i in self.stage_layers(stage))
        if stage == self.pp - 1:
            attention += s.head_seconds(self.local_sequences)
        moe = sum(i >= shape.num_dense_layers for i in self.stage_layers(stage))
        again = 4 / 3 if self.workload.recompute == "full" else 1.0
        return attention, moe * s.expert_seconds(self.ep) * again

    def step(self) -> StepParts:
        """One optimizer step on the busiest stage."""
        n, one = self.micro_batches, self.exchange()
        busiest, at = 0.0, (0.0, 0.0, 0)
        calls = 6 if self.workload.recompute == "full" else 4  # the repeated forward exchanges again
        for stage in range(self.pp):
            a, e = self.stage_compute(stage)
            moe = sum(i >= self.model.num_dense_layers for i in self.stage_layers(stage))
            t = a + e + calls * moe * one.total
            if t > busiest:
                busiest, at = t, (a, e, calls * moe)
        a, e, calls = at
        comm = calls * one.total
        hidden = min(comm, a + e) if self.overlap == "ideal" else 0.0
        p2p = 2 * self.p2p_seconds()
        per_batch = a + e + comm - hidden + p2p
        return StepParts(
            attention=n * a,
            experts=n * e,
            exchange=n * comm,
            exchange_latency=n * calls * one.latency,
            hidden=n * hidden,
            p2p=n * p2p,
            bubble=(self.pp - 1) * per_batch,
            gradients=self.gradient_seconds(),
        )

    # ---- memory
    def memory(self, stage: int) -> MemoryParts:
        """One rank of a stage under 1F1B: PP - i micro-batches in flight."""
        shape, w = self.model, self.workload
        layers = self.stage_layers(stage)
        dense = sum(i < shape.num_dense_layers for i in layers)
        moe = len(layers) - dense
        tokens = self.local_sequences * w.seq_len
        live = live_units_1f1b(pp=self.pp, stage=stage, micro_batches=self.micro_batches)
        pairs = tokens * shape.top_k * w.imbalance
        copies = self.ep * self.dp if self.workload.shard_optimizer else 1
        a = attention_rank_memory(
            shape,
            layers=max(moe, 1),
            dense_layers=dense,
            embedding=stage == 0,
            head=stage == self.pp - 1,
            tokens=tokens,
            live_units=live * max(moe, 1) + (stage == self.pp - 1),  # the head's unit is its transient
            rows_per_token=shape.top_k,
            precision=w.precision,
            recompute=w.recompute,
            optimizer_copies=copies,
            allowance=self.cluster.reserved_bytes,
        )
        e = expert_rank_memory(
            shape,
            layers=moe,
            experts=-(-shape.num_experts // self.ep),
            rows=pairs if self.ep > 1 else tokens,
            pairs=pairs,
            live_units=live * moe,
            precision=w.precision,
            save=w.save,
            optimizer_copies=self.dp if self.workload.shard_optimizer else 1,
        )
        # under full recomputation only the block's input is kept: the experts' part lives for one unit
        kept = e.activations / (live * moe) if w.recompute == "full" and moe else e.activations
        return MemoryParts(
            weights=a.weights + e.weights,
            gradients=a.gradients + e.gradients,
            optimizer=a.optimizer + e.optimizer,
            activations=a.activations + kept,
            routing=a.routing + e.routing,
            exchange=a.exchange + e.exchange,
            transient=a.transient + e.transient,
            allowance=a.allowance,
            live_units=live,
            notes=a.notes,
        )

    def paper_memory(self, stage: int = 0) -> float:
        """Piper's M_1F1B of the same strategy (one GPU's batch for b), bytes."""
        shape, w = self.model, self.workload
        model = piper.PiperModel(
            dim=shape.dim,
            num_layers=shape.num_layers,
            num_experts=shape.num_experts,
            top_k=shape.top_k,
            num_heads=shape.num_heads,
            expert_dim=shape.expert_dim,
            batch=self.micro_batches * w.micro_batch,
            seq_len=w.seq_len,
        )
        return piper.memory_1f1b(model, pp=self.pp, ep=self.ep, micro_batches=self.micro_batches, stage=stage)

    def with_overlap(self) -> ColocatedCosts:
        return replace(self, overlap="ideal")
