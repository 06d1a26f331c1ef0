"""One layout of the parity table on one rank: an fp64 step, then fp32 steps with replayed and with free routing."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchmoe.titan.parity_data import VOCAB, Tokens
from torchmoe.titan.shims import ensure

__all__ = ["Program", "run_program"]

MAX_NORM = 0.5  # below the norm of these models, so that clipping acts in every layout


@dataclass(frozen=True)
class Program:
    """What one rank runs. Without ``attention`` torchtitan's own path."""

    model: str
    tokens: Tokens
    steps: int
    folder: str
    attention: tuple[int, ...] = ()
    ffn: tuple[int, ...] = ()
    replicas: int = 1
    expert_parallel: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    """More of DisagConfig."""
    recompute: str | None = None
    """Activation checkpointing: None, "full" or "selective"."""


def _trainer(program: Program, dtype: str) -> Any:
    """A Trainer or DisagTrainer of this program, at the weights of the seed checkpoint if it is there."""
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
    from torchtitan.trainer import Trainer

    from torchmoe.titan.data import ByteTokenizer, NoData
    from torchmoe.titan.parity_models import MODELS
    from torchmoe.titan.shims import spmd_backend
    from torchmoe.titan.trainer import DisagConfig, DisagTrainer, split_pipeline

    tokens, disaggregated = program.tokens, bool(program.attention)
    sequences = sum(map(len, tokens.shape))
    local = sequences if disaggregated else sequences // program.expert_parallel if tokens.equal else 1
    spec = MODELS[program.model]()
    seed = os.path.join(program.folder, f"seed-{program.model}", "step-0")
    common = {
        "model_spec": spec,
        "dump_folder": tempfile.gettempdir(),
        "loss": CrossEntropyLoss.Config(global_vocab_size=VOCAB),
        "tokenizer": ByteTokenizer.Config(),
        "dataloader": NoData.Config(),
        "metrics": MetricsProcessor.Config(log_freq=1, disable_color_printing=True),
        "optimizer": default_adamw(lr=2e-3),
        "lr_scheduler": LRSchedulersContainer.Config(warmup_steps=2),
        "checkpoint": CheckpointManager.Config(
            enable=True, folder="torchmoe-parity-none", initial_load_path=seed, load_only=os.path.isdir(seed), keep_latest_k=0
        ),
        "activation_checkpoint": {None: None, "full": FullAC.Config(), "selective": SelectiveAC.Config()}[program.recompute],
        "debug": DebugConfig(seed=0),
        "training": TrainingConfig(
            local_batch_size=local,
            global_batch_size=-1 if disaggregated or tokens.equal else tokens.num_sequences,
            seq_len=16,
            steps=100,
            max_norm=MAX_NORM,
            disable_cuda_graphs=True,
            dtype=dtype,
            mixed_precision_param=dtype,
            mixed_precision_reduce=dtype,
        ),
        "parallelism": ParallelismConfig(
            spmd_backend=spmd_backend(),
            expert_parallel_degree=program.expert_parallel,
            pipeline_parallel_microbatch_size=len(tokens.shape[0]),
        ),
    }
    if disaggregated:
        spec.pipelining_fn = split_pipeline
        sizes: dict[str, Any] = {"attention": list(program.attention), "ffn": list(program.ffn), "replicas": program.replicas}
        disag = DisagConfig(**sizes, record=True, **program.options)
        trainer = DisagTrainer.Config(**common, disag=disag).build()
    else:
        trainer = Trainer.Config(**common).build()
    if os.path.isdir(seed):
        trainer.checkpointer.load()
    elif dist.get_world_size() == 1:
        # the seed checkpoint: one process, fp32
        trainer.checkpointer.folder = os.path.dirname(seed)
        trainer.checkpointer.save(curr_step=0, last_step=True)
    _capture_metrics(trainer)
    return trainer


def _capture_metrics(trainer: Any) -> None:
    trainer.logged = []

    def log(step: int, loss: float, largest: float, norm: float, extra_metrics: Any = None) -> None:
        trainer.logged.append((loss, norm))

    trainer.metrics_processor.log = log


class _Tap:
    """Records the expert ids a router chooses, or replaces them by recorded ones.

    A recompute in backward gets ids of other tokens: under activation checkpointing the run equals the single process only if
    the recompute takes the saved ids and not these.
    """

    def __init__(self, router: Any, replay_TK: Tensor | None) -> None:
        self.router, self.replay_TK = router, replay_TK
        self.at = 0
        self.chosen: list[tuple[int, Tensor]] = []
        self.original = router.forward
        router.forward = self.forward

    def forward(self, x_BLD: Tensor, bias: Any = None) -> tuple[Tensor, Tensor, Tensor]:
        again = torch._C._current_graph_task_id() != -1
        gates, ids, scores = self.original(x_BLD, bias)
        n = ids.shape[0] * ids.shape[1]
        if self.replay_TK is not None:
            start = 0 if again else self.at
            want = self.replay_TK[start : start + n].view_as(ids)
            # as the answer of a top-k, which is what the recompute policies save
            rank = torch.arange(ids.shape[-1], 0, -1, dtype=scores.dtype).expand(ids.shape)
            ids = torch.topk(torch.zeros_like(scores).scatter(-1, want, rank), ids.shape[-1], dim=-1).indices
            gates = scores.gather(-1, ids)
            if self.router.route_norm:
                gates = gates / (gates.sum(-1, keepdim=True) + 1e-20)
            gates = gates * self.router.route_scale
        if not again:
            self.chosen.append((self.at, ids.reshape(n, ids.shape[-1]).clone()))
            self.at += n
        return gates, ids, scores

    def remove(self) -> None:
        self.router.forward = self.original


def _step(trainer: Any, program: Program, step: int, replay: dict[int, Tensor] | None) -> dict[int, list[tuple[int, Tensor]]]:
    """One training step; returns what each MoE layer's router chose, as (offset in the global batch, ids)."""
    tokens = program.tokens
    trainer.step = step
    taps: dict[int, _Tap] = {}
    if program.attention:
        stages = trainer.runner.stages.attention
        plain = dict(stages)
        for layer, stage in plain.items():
            tap = taps[layer] = _Tap(stage.block.moe.router, None if replay is None else replay[layer])

            def tapped(res_TD: Tensor, mb: Any, stage: Any = stage, tap: _Tap = tap) -> Any:
                where = trainer.roles.where
                mine = trainer.roles.placement.sequences(where.group, where.index, len(mb.lengths), where.replica)
                tap.at = sum(map(sum, tokens.shape[: mb.index])) + sum(mb.lengths[: mine.start])
                return stage(res_TD, mb)

            tapped.load_E = stage.load_E  # type: ignore[attr-defined]
            stages[layer] = tapped
        trainer.train_step(iter(tokens.microbatches(step)))
        stages.update(plain)
    else:
        rank, world = dist.get_rank(), dist.get_world_size()
        blocks = [b for b in trainer.model_parts[0].layers.values() if b.moe_enabled]
        for layer, block in enumerate(blocks):
            tap = taps[layer] = _Tap(block.moe.router, None if replay is None else replay[layer])
            tap.at = rank * tokens.num_tokens // world
        trainer.train_step(iter(tokens.whole(step, rank, world)))
    for tap in taps.values():
        tap.remove()
    return {layer: tap.chosen for layer, tap in taps.items()}


def _join(chosen: Sequence[tuple[int, Tensor]]) -> Tensor:
    return torch.cat([ids for _, ids in sorted(chosen, key=lambda c: c[0])])


def _gradients(trainer: Any) -> dict[str, tuple[Tensor, tuple[int, ...] | None]]:
    """Name -> (gradient after clipping, owned experts or None for a whole tensor)."""
    from torch.distributed.tensor import DTensor
    from torchtitan.components.checkpointer.utils import canonical_fqn

    from torchmoe.titan.expert_part import ExpertPart

    part = trainer.model_parts[0]
    owners = {}
    if isinstance(part, ExpertPart):
        owners = {f"{fqn}.{n}": e.owned for fqn, e in part.experts().items() for n, _ in e.named_parameters(recurse=False)}
    out = {}
    for name, parameter in part.named_parameters():
        g = parameter.grad
        assert g is not None
        name = canonical_fqn(name)
        out[name] = ((g.full_tensor() if isinstance(g, DTensor) else g).detach().clone(), owners.get(name))
    return out


def _wire(trainer: Any, program: Program, routing: dict[int, Tensor], started: int) -> tuple[Any, Any]:
    """(what this rank sent since message ``started``, what the pure prediction says all ranks send).

    Both: (kind, source, destination) -> (messages, bytes).
    """
    from torchmoe.costs.exchange import exchange_traffic

    sent: dict[Any, Any] = {}
    for m in trainer.roles.transport.log()[started:]:
        key = (m.communicator.split(":")[0], m.source, m.destination)
        old = sent.get(key, (0, 0))
        sent[key] = (old[0] + 1, old[1] + m.num_bytes)
    ids: dict[tuple[int, int], list[list[list[int]]]] = {}
    for layer, ids_TK in routing.items():
        at = 0
        for m, lengths in enumerate(program.tokens.shape):
            per_sequence = []
            for n in lengths:
                per_sequence.append(ids_TK[at : at + n].tolist())
                at += n
            ids[layer, m] = per_sequence
    exchange = trainer.runner.exchange
    placement = trainer.roles.placement
    sizes: dict[str, Any] = {"dim": exchange.dim, "top_k": exchange.top_k, "itemsize": exchange.dtype.itemsize}
    how = {k: getattr(exchange.plan, k) for k in ("residual", "combine", "capacity")}
    traffic = exchange_traffic(placement, ids, **sizes, **how)
    return sent, {k: (t.messages, t.num_bytes) for k, t in traffic.items()}


def _one(program: Program, routing: Any) -> dict[str, Any]:
    from torchmoe.titan.exact import exact_casts

    out: dict[str, Any] = {"sent": None, "predicted": None}
    with exact_casts(torch.float64):
        trainer = _trainer(program, "float64")
        grads: dict[str, Any] = {}
        trainer.optimizers.register_step_pre_hook(lambda *_: grads.update(_gradients(trainer)))
        started = len(trainer.roles.transport.log()) if program.attention else 0  # the start-up's handshake is not traffic
        torch.set_default_dtype(torch.float64)
        chosen = _step(trainer, program, 1, None)
        torch.set_default_dtype(torch.float32)
        out["gradients"], out["norm"] = grads, trainer.logged[-1][1]
        if program.attention:
            recorded = routing["float64"]
            out["sent"], out["predicted"] = _wire(trainer, program, recorded, started)
        elif routing is None:
            out["routing"] = {"float64": {layer: _join(c) for layer, c in chosen.items()}}
        trainer.close()
    with exact_casts(torch.float32):
        if routing is None:
            trainer = _trainer(program, "float32")
            steps = [_step(trainer, program, s, None) for s in range(1, program.steps + 1)]
            out["losses"] = [loss for loss, _ in trainer.logged]
            out["routing"]["steps"] = [{layer: _join(c) for layer, c in step.items()} for step in steps]
            trainer.close()
        else:
            for name in ("replayed", "free"):
                trainer = _trainer(program, "float32")
                for s in range(1, program.steps + 1):
                    _step(trainer, program, s, routing["steps"][s - 1] if name == "replayed" else None)
                out[name] = [loss for loss, _ in trainer.logged]
                trainer.close()
    return out


def run_program(ctx: Any, programs: Sequence[Program], routings: Sequence[Any] | None) -> list[dict[str, Any]]:
    """Run several programs one after the other on this rank. ``routings`` None: these are the single-process references."""
    import logging
    import warnings

    ensure()
    for name in (None, "torch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    if routings is None:
        for program in programs:  # the seed checkpoint is written in fp32 and read in both dtypes
            _trainer(program, "float32").close()
    return [_one(p, None if routings is None else routings[i]) for i, p in enumerate(programs)]
