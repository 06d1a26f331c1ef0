"""DisagTrainer: torchtitan's Trainer on a placement of attention and FFN ranks."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchtitan.components.dataloader import DataloaderExhaustedError
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.trainer import Trainer

from torchmoe.comm.gradients import clip_by_global_norm, sum_gradients
from torchmoe.comm.m2n import M2NExchange
from torchmoe.errors import ConfigError
from torchmoe.pipeline.runtime.runner import Runner
from torchmoe.titan.check import check_config
from torchmoe.titan.checkpoint import ExpertOptimizer
from torchmoe.titan.data import NoData
from torchmoe.titan.expert_part import ExpertPart
from torchmoe.titan.initialise import initialise
from torchmoe.titan.options import DisagConfig, exchange_options, matching_groups, placement_of, schedules
from torchmoe.titan.roles import RoleGroups, RoleParallelDims
from torchmoe.titan.split import split_model
from torchmoe.titan.sums import gradient_sums
from torchmoe.titan.validator import DisagValidator
from torchmoe.titan.wrap import Wrapping

__all__ = ["DisagConfig", "DisagTrainer", "check_config", "placement_of", "split_pipeline"]

Batch = tuple[dict[str, Tensor], Tensor]
Lengths = tuple[int, ...]


def split_pipeline(
    model: Any,
    *,
    parallel_dims: RoleParallelDims,
    training: Any,
    parallelism: Any,
    device: torch.device,
    model_config: Any,
    loss_fn: Any,
    compile_config: Any,
    ac_config: Any,
    dump_folder: str,
    **kwargs: Any,
) -> tuple[Runner, list[nn.Module], bool, bool]:
    """A ``ModelSpec.pipelining_fn``: (runner, [this rank's part], has the embedding, has the head)."""
    roles, options = parallel_dims.roles, parallel_dims.options
    placement, where = roles.placement, roles.where
    moe = next(layer.moe for layer in model_config.layers if layer.moe is not None)
    settings = exchange_options(options, placement)
    wrap = Wrapping(
        parallel_dims=parallel_dims,
        training=training,
        parallelism=parallelism,
        compile_config=compile_config,
        ac_config=ac_config,
        dump_folder=dump_folder,
        mesh=roles.attention_mesh() if options.shard_attention else None,
        sum_gradients=device.type == "cpu",
    )
    part, stages, _ = split_model(
        model, placement, where, loss_fn=loss_fn, residual=settings["residual"], save=options.save, wrap=wrap
    )
    part.init_weights = lambda **_: initialise(part, parallel_dims.seed)
    optimizer = parallel_dims.optimizer  # torchtitan wants every pattern to match in every part
    optimizer.param_groups = matching_groups(optimizer.param_groups, part)
    exchange = M2NExchange(
        placement,
        roles.transport,
        dim=model_config.dim,
        top_k=moe.router.top_k,
        dtype=TORCH_DTYPE_MAP[training.dtype],
        device=device,
        **settings,
    )
    exchange.handshake()  # ranks with different settings are named here and not by a hang
    num_microbatches = training.local_batch_size // parallelism.pipeline_parallel_microbatch_size
    train, evaluate = schedules(placement, options, num_microbatches)
    runner = Runner(placement, train, stages=stages, exchange=exchange, eval_schedule=evaluate, trace=True)
    return runner, [part], where.group == placement.embedding_group, where.group == placement.head_group


def lengths_of(batch: Batch) -> Lengths:
    """Tokens of every sequence of a global micro-batch."""
    inputs, labels = batch
    given = inputs.get("lengths")
    return (labels.shape[1],) * labels.shape[0] if given is None else tuple(int(n) for n in given)


class DisagTrainer(Trainer):
    """torchtitan's Trainer with attention and routed experts on different ranks.

    ``training.local_batch_size`` counts the sequences of one step of the whole run, and
    ``parallelism.pipeline_parallel_microbatch_size`` those of one global micro-batch; each attention rank takes its slice of
    every micro-batch by sequence index. Norm clipping is over both roles, balancing over the attention ranks of a layer.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        disag: DisagConfig = field(default_factory=DisagConfig)

    def __init__(self, config: Any) -> None:
        check_config(config)
        self.finite_data = not getattr(config.dataloader, "infinite", True)
        super().__init__(config)
        part = self.model_parts[0]
        blocks = [str(i) for i, layer in enumerate(self.model_config.layers) if layer.moe is not None]
        residual = self.runner.exchange.residual
        self.sums = gradient_sums(
            part, self.roles.placement, self.roles.where, residual, blocks, sharded=config.disag.shard_attention
        )
        """What of this part is summed over which ranks, and counted in the norm here."""
        if isinstance(part, ExpertPart) and self.checkpointer.enable:
            owners = {
                f"{fqn}.{name}": (experts.owned, experts.num_experts)
                for fqn, experts in part.experts().items()
                for name, _ in experts.named_parameters(recurse=False)
            }
            states: dict[str, Any] = self.checkpointer.states
            states["optimizer"] = ExpertOptimizer(self.optimizers, owners)
        if config.validator.enable:
            self.validator = DisagValidator(config.validator, trainer=self)
        self.ntokens_seen: int
        self.last_metrics: dict[str, float] = {}
        self.load_LE: Tensor | None = None
        """Tokens per MoE layer and expert in the last step, over all attention ranks."""

    # ---- set-up
    def init_distributed(self) -> ParallelDims:
        config = self.config
        os.environ.setdefault("LOG_RANK", "0")  # torchtitan warns unless the rank that logs the loss is in it
        dist_utils.init_distributed(
            config.comm, enable_cpu_backend=config.training.enable_cpu_offload, base_folder=config.dump_folder
        )
        seed = config.debug.seed
        if seed is None:
            box = [int(torch.randint(2**31, ()).item())]
            dist.broadcast_object_list(box, src=0)
            seed = box[0]
        placement = placement_of(config)
        residual = exchange_options(config.disag, placement)["residual"]
        self.roles = RoleGroups.create(placement, residual=residual, device=self.device, record=config.disag.record)
        if self.roles.where.role == "ffn":
            config.dataloader = NoData.Config()
        backend = config.parallelism.spmd_backend
        return RoleParallelDims.of(self.roles, seed=seed, options=config.disag, optimizer=config.optimizer, spmd_backend=backend)

    @property
    def runner(self) -> Runner:
        return self.pp_schedule  # type: ignore[no-any-return]

    @property
    def is_attention(self) -> bool:
        return self.roles.where.role == "attention"

    # ---- one step
    def slice_batch(self, batch: Batch) -> Batch:
        """This rank's sequences of a global micro-batch.

        A batch of sequences of unequal length has flat tensors [tokens] and ``inputs["lengths"]``, tokens of each sequence.
        """
        inputs, labels = dict(batch[0]), batch[1]
        where, lengths = self.roles.where, lengths_of(batch)
        mine = self.roles.placement.sequences(where.group, where.index, len(lengths), where.replica)
        flat = inputs.pop("lengths", None) is not None
        rows = range(sum(lengths[: mine.start]), sum(lengths[: mine.stop])) if flat else mine
        part = {k: v[rows.start : rows.stop].to(self.device) for k, v in inputs.items()}
        return part, labels[rows.start : rows.stop].to(self.device)

    def step_arguments(self, batches: Sequence[Batch], lengths: Sequence[Lengths]) -> dict[str, Any]:
        """Arguments of ``runner.step`` on this rank for the global micro-batches of a step; FFN ranks have no batches."""
        if not self.is_attention:
            return {"lengths": lengths} if self.pp_has_last_stage else {}
        args, kwargs, targets = [], [], []
        seen = self.ntokens_seen
        for batch in batches:
            inputs, labels, extra = self.post_dataloading_process(*self.slice_batch(batch))
            args.append((inputs,))
            kwargs.append(extra)
            targets.append(labels)
        self.ntokens_seen = seen  # train_step counts the tokens of the whole run
        return {
            "arg_mbs": args if self.pp_has_first_stage else None,
            "kwarg_mbs": kwargs,
            "target_mbs": targets,
            "lengths": lengths,
        }

    def train_step(self, data_iterator: Iterator[Batch]) -> None:
        """One optimizer step.

        Raises:
            PeerLost: another rank died, froze or failed; the message names it and says what this rank was waiting for.
        """
        with self.roles.naming_the_lost(f"step {self.step}"):
            self._train_step(self._read(data_iterator))

    def _train_step(self, groups: list[list[Batch]]) -> None:
        self.optimizers.zero_grad(set_to_none=True)
        lr_metrics = self.lr_schedulers.get_metrics()
        loss = torch.zeros((), dtype=torch.float64)
        valid, shapes = self._announce(groups)
        kwargs = {"global_valid_tokens": torch.tensor(valid, device=self.device)}
        if self.config.disag.shard_attention:
            self._refuse_idle_shards(shapes)
        for group, lengths in zip(groups, shapes, strict=True):
            losses: list[Tensor] | None = [] if self.pp_has_last_stage else None
            with self.train_context():
                self.runner.step(**self.step_arguments(group, lengths), losses=losses, loss_kwargs=kwargs)
            if losses:
                loss += torch.stack(losses).sum().double().cpu()
        grad_norm = self._reduce()
        totals = self._totals(loss, sum(labels.numel() for group in groups for _, labels in group))
        self.checkpointer.maybe_wait_for_staging()
        self.optimizers.step()
        self.lr_schedulers.step()
        if not math.isfinite(totals["loss"]):
            raise RuntimeError(f"loss is {totals['loss']} at step {self.step}; lower the learning rate, or look at the data")
        self.ntokens_seen += int(totals["tokens"])
        self.metrics_processor.ntokens_since_last_log += int(totals["tokens"]) if not self.is_attention else 0
        self.last_metrics = {**totals, "grad_norm": grad_norm}
        if self.metrics_processor.should_log(self.step):
            times = self.metrics_processor.data_loading_times
            if not times:
                times.append(0.0)
            loss_value, extra = totals["loss"], {"n_tokens_seen": self.ntokens_seen, **lr_metrics}
            self.metrics_processor.log(self.step, loss_value, loss_value, grad_norm, extra_metrics=extra)

    def _refuse_idle_shards(self, shapes: Sequence[Sequence[Lengths]]) -> None:
        """FSDP2 reduces the gradients of a micro-batch over the group: a rank without tokens would have none to bring."""
        placement, where = self.roles.placement, self.roles.where
        for lengths in (each for group in shapes for each in group):
            mine = placement.sequences(where.group, where.index, len(lengths), where.replica)
            if not sum(lengths[mine.start : mine.stop]):
                raise ConfigError(
                    f"disag.shard_attention: {self.roles.say(self.roles.rank)} has no token of a micro-batch with sequences of "
                    f"{list(lengths)} tokens; give every attention rank some, or use shard_attention=False"
                )

    def _announce(self, groups: Sequence[Sequence[Batch]]) -> tuple[int, list[list[Lengths]]]:
        """(labels that count, lengths of the sequences of every micro-batch), which FFN ranks with the head must hear of."""
        valid = sum(int((labels != IGNORE_INDEX).sum()) for group in groups for _, labels in group)
        shapes = [[lengths_of(batch) for batch in group] for group in groups]
        if self.roles.placement.head == "ffn":
            box: list[Any] = [valid, shapes]
            dist.broadcast_object_list(box, src=0)
            valid, shapes = box
        return valid, shapes

    def _read(self, data_iterator: Iterator[Batch]) -> list[list[Batch]]:
        """The global micro-batches of every accumulation group. On FFN ranks, empty groups.

        Raises:
            DataloaderExhaustedError: on all ranks, when a finite loader has not enough for a whole step.
        """
        per_group = self.num_pipeline_parallel_microbatches if self.is_attention else 0
        groups: list[list[Batch]] = []
        ended: DataloaderExhaustedError | None = None
        try:
            for _ in range(self.gradient_accumulation_steps):
                groups.append([next(data_iterator) for _ in range(per_group)])
        except DataloaderExhaustedError as e:
            ended = e
        if self.finite_data:  # FFN ranks read nothing and must hear of the end
            left = torch.tensor(int(ended is None), device=self.device)
            dist.all_reduce(left, op=dist.ReduceOp.MIN)
            if not left:
                raise ended or DataloaderExhaustedError
        elif ended is not None:
            raise ended
        return groups

    def _reduce(self) -> float:
        """Sum the gradients over the ranks that share the parameters, clip by the norm over both roles; returns the norm."""
        wide = TORCH_DTYPE_MAP[self.config.training.mixed_precision_reduce]
        for shared in self.sums:
            for p in shared.parameters:
                if p.requires_grad and p.grad is None:
                    p.grad = torch.zeros_like(p)
            if len(shared.ranks) > 1:
                sum_gradients(shared.parameters, self.roles.groups[shared.ranks], dtype=wide)
        parameters = [p for shared in self.sums for p in shared.parameters]
        counted = [p for shared in self.sums if shared.counted for p in shared.parameters]
        return float(clip_by_global_norm(parameters, self.config.training.max_norm, counted=counted))

    def _totals(self, loss: Tensor, tokens: int) -> dict[str, float]:
        """Sums over all ranks of loss and expert load, and the tokens of the step: one small all-reduce."""
        placement = self.roles.placement
        load_LE = torch.zeros(placement.num_layers, placement.num_experts, dtype=torch.float64)
        for layer, stage in self.runner.stages.attention.items():
            load_LE[layer] = stage.load_E().double().cpu()  # type: ignore[attr-defined]
        mine = torch.tensor([float(tokens) if self.roles.rank == 0 else 0.0], dtype=torch.float64)
        flat = torch.cat([loss.reshape(1), mine, load_LE.reshape(-1)]).to(self.device)
        dist.all_reduce(flat)
        flat = flat.cpu()
        self.load_LE = flat[2:].view_as(load_LE)
        return {"loss": float(flat[0]), "tokens": float(flat[1])}

    # ---- evaluation
    def evaluate(self, batches: Sequence[Batch]) -> float:
        """Mean loss per token over global micro-batches, as many as a multiple of a step's. Collective; FFN ranks pass any list
        of the same length.

        Raises:
            ConfigError: the number of micro-batches is not a multiple of the step's.
            PeerLost: see :meth:`train_step`.
        """
        n = self.num_pipeline_parallel_microbatches
        if not batches or len(batches) % n:
            raise ConfigError(f"evaluate got {len(batches)} micro-batches; give a multiple of {n}, the micro-batches of a step")
        with self.roles.naming_the_lost("evaluation"), self.evaluating():
            total = torch.zeros(2, dtype=torch.float64)
            for at in range(0, len(batches), n):
                total += self.evaluate_step(batches[at : at + n] if self.is_attention else [])
            return self.mean_loss(total)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Inside, the model is in evaluation mode and no gradients are kept."""
        try:
            with torch.no_grad():
                for part in self.model_parts:
                    part.eval()
                yield
        finally:
            for part in self.model_parts:
                part.train()

    def evaluate_step(self, group: Sequence[Batch]) -> Tensor:
        """[sum of the losses, labels that count] of this rank for a step's micro-batches (on FFN ranks: none)."""
        valid, (lengths,) = self._announce([group])
        losses: list[Tensor] | None = [] if self.pp_has_last_stage else None
        self.runner.eval(**self.step_arguments(group, lengths), losses=losses)
        loss = float(torch.stack(losses).sum()) if losses else 0.0
        return torch.tensor([loss, float(valid) if self.roles.rank == 0 else 0.0], dtype=torch.float64)

    def mean_loss(self, total: Tensor) -> float:
        """Loss per label of the sums over all ranks of what :meth:`evaluate_step` returned."""
        total = total.to(self.device)
        dist.all_reduce(total)
        return float(total[0] / total[1])
