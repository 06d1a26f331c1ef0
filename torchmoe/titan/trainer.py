"""DisagTrainer: torchtitan's Trainer on a placement of attention and FFN ranks."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchtitan.components.dataloader import BaseDataLoader, DataloaderExhaustedError
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.trainer import Trainer

from torchmoe.comm.gradients import clip_by_global_norm, counts_in_norm, sum_gradients
from torchmoe.comm.m2n import M2NExchange
from torchmoe.errors import ConfigError
from torchmoe.pipeline.lower import lower
from torchmoe.pipeline.runtime.runner import Runner
from torchmoe.pipeline.schedules.afpipe import afpipe
from torchmoe.placement import Deadlines, Placement
from torchmoe.titan.check import check_block
from torchmoe.titan.checkpoint import ExpertOptimizer
from torchmoe.titan.expert_part import ExpertPart
from torchmoe.titan.failure import naming_the_dead
from torchmoe.titan.initialise import initialise
from torchmoe.titan.roles import RoleGroups, RoleParallelDims
from torchmoe.titan.split import split_model

__all__ = ["DisagConfig", "DisagTrainer", "placement_of", "split_pipeline"]

Batch = tuple[dict[str, Tensor], Tensor]


@dataclass(kw_only=True, slots=True)
class DisagConfig:
    """The layout of a disaggregated run. Sizes are per group; see :class:`torchmoe.placement.Placement`."""

    attention: list[int] = field(default_factory=lambda: [1])
    """Ranks of each attention group."""

    ffn: list[int] = field(default_factory=lambda: [1])
    """Ranks of each FFN group."""

    replicas: int = 1
    """Whole attention/FFN pipelines; their gradients are summed."""

    cycle: int | None = None
    """Micro-batches a group issues per unit before its next one, from 2p; default 4p."""

    exchange_seconds: float = 60.0
    """Deadline of one message."""

    record: bool = False
    """Keep a log of every message sent."""


class NoData(BaseDataLoader):
    """The data loader of FFN ranks: they read nothing and have no position to save."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, **kwargs: Any) -> None:
        pass

    def __iter__(self) -> Iterator[Batch]:
        return iter(())

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


def placement_of(config: Any) -> Placement:
    """The placement of a DisagTrainer.Config: group sizes from ``disag``, layers and experts from the model.

    Raises:
        ConfigError: no MoE layer, layers with different numbers of experts, or sizes that the placement refuses.
    """
    moe = [layer.moe for layer in config.model_spec.model.layers if getattr(layer, "moe", None) is not None]
    if not moe:
        raise ConfigError("the model has no MoE layer; disaggregation needs at least one")
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
        deadlines=Deadlines(exchange=message, step=5 * message, init=max(600.0, 10 * message)),
    )


def check_config(config: Any) -> Placement:
    """Refuse what a disaggregated run cannot do, before anything is launched. Returns the placement."""
    placement = placement_of(config)
    training, parallelism = config.training, config.parallelism
    batch, micro = training.local_batch_size, parallelism.pipeline_parallel_microbatch_size
    if batch % micro:
        raise ConfigError(
            f"training.local_batch_size={batch} (sequences of a step) is not a multiple of "
            f"parallelism.pipeline_parallel_microbatch_size={micro}; change one of them"
        )
    most = max(placement.attention) * placement.replicas
    if micro < most:
        raise ConfigError(
            f"a micro-batch of {micro} sequences over {most} attention ranks leaves some without any; raise "
            "parallelism.pipeline_parallel_microbatch_size, or use fewer attention ranks"
        )
    degrees = {
        name: getattr(parallelism, name)
        for name in (
            "data_parallel_replicate_degree",
            "tensor_parallel_degree",
            "context_parallel_degree",
            "pipeline_parallel_degree",
            "expert_parallel_degree",
        )
    }
    for name, degree in degrees.items():
        if degree != 1:
            raise ConfigError(f"parallelism.{name}={degree}: in a disaggregated run the groups come from disag; set it to 1")
    if config.activation_checkpoint is not None:
        raise ConfigError("activation_checkpoint is not supported in a disaggregated run yet; set it to None")
    if config.compile.enable:
        raise ConfigError("compile.enable is not supported in a disaggregated run yet; switch it off")
    if config.validator.enable:
        raise ConfigError("torchtitan's validator slices by its own mesh; use DisagTrainer.evaluate() and validator.enable=False")
    _schedules(placement, config.disag, batch // micro)
    check_model(config.model_spec.model, placement)
    return placement


def check_model(model_config: Any, placement: Placement) -> None:
    """Refuse a model that cannot be split in this placement.

    Raises:
        ConfigError: tied embeddings across two groups, or a block that computes something else than its split form.
    """
    if getattr(model_config, "enable_weight_tying", False) and placement.embedding_group != placement.head_group:
        raise ConfigError(
            f"tied embeddings: the embedding is on {placement.embedding_group} and the head on {placement.head_group}; "
            "untie them, or choose attention groups whose number divides the number of MoE layers"
        )
    seen = set()
    for i, layer in enumerate(model_config.layers):
        if getattr(layer, "moe", None) is None:
            continue
        kind = (type(layer), type(layer.attention), type(layer.moe), layer.moe.shared_experts is None)
        if kind not in seen:
            seen.add(kind)
            check_block(layer, f"layers.{i}")


def _schedules(placement: Placement, disag: DisagConfig, num_microbatches: int) -> Any:
    train = afpipe(placement, num_microbatches, cycle=disag.cycle)
    evaluate = afpipe(placement, num_microbatches, cycle=disag.cycle, forward_only=True)
    return lower(train, placement), lower(evaluate, placement)


def split_pipeline(
    model: Any,
    *,
    parallel_dims: RoleParallelDims,
    training: Any,
    parallelism: Any,
    device: torch.device,
    model_config: Any,
    loss_fn: Any,
    **kwargs: Any,
) -> tuple[Runner, list[nn.Module], bool, bool]:
    """A ``ModelSpec.pipelining_fn``: (runner, [this rank's part], has the embedding, has the head)."""
    roles = parallel_dims.roles
    placement, where = roles.placement, roles.where
    moe = next(layer.moe for layer in model_config.layers if layer.moe is not None)
    part, stages, _ = split_model(model, placement, where, loss_fn=loss_fn)
    part.init_weights = lambda **_: initialise(part, parallel_dims.seed)
    exchange = M2NExchange(
        placement,
        roles.transport,
        dim=model_config.dim,
        top_k=moe.router.top_k,
        dtype=TORCH_DTYPE_MAP[training.dtype],
        device=device,
    )
    exchange.handshake()  # ranks with different settings are named here and not by a hang
    num_microbatches = training.local_batch_size // parallelism.pipeline_parallel_microbatch_size
    train, evaluate = _schedules(placement, parallel_dims.options, num_microbatches)
    runner = Runner(placement, train, stages=stages, exchange=exchange, eval_schedule=evaluate, trace=True)
    return runner, [part], where.group == placement.embedding_group, where.group == placement.head_group


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
        if isinstance(part, ExpertPart) and self.checkpointer.enable:
            owners = {
                f"{fqn}.{name}": (experts.owned, experts.num_experts)
                for fqn, experts in part.experts().items()
                for name, _ in experts.named_parameters(recurse=False)
            }
            states: dict[str, Any] = self.checkpointer.states
            states["optimizer"] = ExpertOptimizer(self.optimizers, owners)
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
        self.roles = RoleGroups.create(placement_of(config), device=self.device, record=config.disag.record)
        if self.roles.where.role == "ffn":
            config.dataloader = NoData.Config()
        backend = config.parallelism.spmd_backend
        return RoleParallelDims.of(self.roles, seed=seed, options=config.disag, spmd_backend=backend)

    @property
    def runner(self) -> Runner:
        return self.pp_schedule  # type: ignore[no-any-return]

    @property
    def is_attention(self) -> bool:
        return self.roles.where.role == "attention"

    # ---- one step
    def slice_batch(self, batch: Batch) -> tuple[Batch, tuple[int, ...]]:
        """This rank's sequences of a global micro-batch, and the lengths of all of its sequences.

        A batch of sequences of unequal length has flat tensors [tokens] and ``inputs["lengths"]``, tokens of each sequence.
        """
        inputs, labels = batch
        where = self.roles.where
        inputs = dict(inputs)
        given = inputs.pop("lengths", None)
        lengths = (labels.shape[1],) * labels.shape[0] if given is None else tuple(int(n) for n in given)
        mine = self.roles.placement.sequences(where.group, where.index, len(lengths), where.replica)
        rows = mine if given is None else range(sum(lengths[: mine.start]), sum(lengths[: mine.stop]))
        part = {k: v[rows.start : rows.stop].to(self.device) for k, v in inputs.items()}
        return (part, labels[rows.start : rows.stop].to(self.device)), lengths

    def step_arguments(self, batches: Sequence[Batch]) -> dict[str, Any]:
        """Arguments of ``runner.step`` on this rank for the global micro-batches of a step."""
        args, kwargs, targets, lengths = [], [], [], []
        seen = self.ntokens_seen
        for batch in batches:
            (part, labels), each = self.slice_batch(batch)
            inputs, labels, extra = self.post_dataloading_process(part, labels)
            args.append((inputs,))
            kwargs.append(extra)
            targets.append(labels)
            lengths.append(each)
        self.ntokens_seen = seen  # train_step counts the tokens of the whole run
        return {
            "arg_mbs": args if self.pp_has_first_stage else None,
            "kwarg_mbs": kwargs,
            "target_mbs": targets if self.pp_has_last_stage else None,
            "lengths": lengths,
        }

    def train_step(self, data_iterator: Iterator[Batch]) -> None:
        """One optimizer step.

        Raises:
            PeerLost: another rank died or failed; the message names it and says what this rank was waiting for.
        """
        groups = self._read(data_iterator)
        with naming_the_dead(self.roles.placement, self.roles.rank, f"step {self.step}"):
            self._train_step(groups)

    def _train_step(self, groups: list[list[Batch]]) -> None:
        self.optimizers.zero_grad(set_to_none=True)
        lr_metrics = self.lr_schedulers.get_metrics()
        tokens = 0
        loss = torch.zeros((), dtype=torch.float64)
        valid = sum(int((labels != IGNORE_INDEX).sum()) for group in groups for _, labels in group)
        for group in groups:
            losses: list[Tensor] | None = [] if self.pp_has_last_stage else None
            if self.is_attention:
                tokens += sum(labels.numel() for _, labels in group)
                valid_tokens = torch.tensor(valid, device=self.device)
                with self.train_context():
                    self.runner.step(
                        **self.step_arguments(group), losses=losses, loss_kwargs={"global_valid_tokens": valid_tokens}
                    )
            else:
                self.runner.step()
            if losses:
                loss += torch.stack(losses).sum().double().cpu()
        grad_norm = self._reduce()
        totals = self._totals(loss, tokens)
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
        parameters = [p for m in self.model_parts for p in m.parameters()]
        for p in parameters:
            if p.requires_grad and p.grad is None:
                p.grad = torch.zeros_like(p)
        if self.roles.gradients is not None:
            sum_gradients(parameters, self.roles.gradients)
        counted = counts_in_norm(self.roles.placement, self.roles.rank)
        return float(clip_by_global_norm(parameters, self.config.training.max_norm, counted=counted))

    def _totals(self, loss: Tensor, tokens: int) -> dict[str, float]:
        """Sums over all ranks of loss and expert load, and the tokens of the step: one small all-reduce."""
        placement = self.roles.placement
        load_LE = torch.zeros(placement.num_layers, placement.num_experts, dtype=torch.float64)
        for layer, stage in self.runner.stages.attention.items():
            load_LE[layer] = stage.block.moe.tokens_per_expert_E.double().cpu()  # type: ignore[attr-defined]
        mine = torch.tensor([float(tokens) if self.roles.rank == 0 else 0.0], dtype=torch.float64)
        flat = torch.cat([loss.reshape(1), mine, load_LE.reshape(-1)]).to(self.device)
        dist.all_reduce(flat)
        flat = flat.cpu()
        self.load_LE = flat[2:].view_as(load_LE)
        return {"loss": float(flat[0]), "tokens": float(flat[1])}

    # ---- evaluation
    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> float:
        """Mean loss per token over global micro-batches, as many as a multiple of a step's. Collective; FFN ranks pass any list
        of the same length.

        Raises:
            ConfigError: the number of micro-batches is not a multiple of the step's.
        """
        n = self.num_pipeline_parallel_microbatches
        if not batches or len(batches) % n:
            raise ConfigError(f"evaluate got {len(batches)} micro-batches; give a multiple of {n}, the micro-batches of a step")
        for part in self.model_parts:
            part.eval()
        total = torch.zeros(2, dtype=torch.float64)
        for at in range(0, len(batches), n):
            group = list(batches[at : at + n])
            losses: list[Tensor] | None = [] if self.pp_has_last_stage else None
            if self.is_attention:
                self.runner.eval(**self.step_arguments(group), losses=losses)
            else:
                self.runner.eval()
            if losses:
                total[0] += torch.stack(losses).sum().double().cpu()
            if self.roles.rank == 0:
                total[1] += sum(int((labels != IGNORE_INDEX).sum()) for _, labels in group)
        for part in self.model_parts:
            part.train()
        total = total.to(self.device)
        dist.all_reduce(total)
        return float(total[0] / total[1])
