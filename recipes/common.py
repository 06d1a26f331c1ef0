"""What the recipes share: torchtitan configs around a model, on torchtitan's own path or on a placement."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torchmoe.titan.shims import ensure, spmd_backend

ensure()

from torchtitan.components.checkpointer import CheckpointManager  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.config import CommConfig, DebugConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

from torchmoe.titan.data import ByteTokenizer, TextDataLoader  # noqa: E402
from torchmoe.titan.model import MoEModel, model_spec  # noqa: E402
from torchmoe.titan.trainer import DisagConfig, DisagTrainer, split_pipeline  # noqa: E402

__all__ = ["Recipe"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A model and how it is trained; the two methods put it on ranks.

    Args:
        name: of the model.
        sequences: of one step of the whole run.
        microbatch: sequences of one global micro-batch; it is cut over the attention ranks.
        seq_len, steps, lr: as in torchtitan.
        dtype: of parameters and rows on the wire.
    """

    name: str
    model: MoEModel
    sequences: int
    microbatch: int
    seq_len: int
    steps: int
    lr: float
    dtype: str = "float32"

    def _common(self) -> dict[str, Any]:
        return {
            "model_spec": model_spec(self.model, name=self.name),
            "loss": CrossEntropyLoss.Config(global_vocab_size=self.model.vocab),
            "tokenizer": ByteTokenizer.Config(),
            "hf_assets_path": ".",
            "dataloader": TextDataLoader.Config(),
            "metrics": MetricsProcessor.Config(log_freq=1, disable_color_printing=True),
            "optimizer": default_adamw(lr=self.lr),
            "lr_scheduler": LRSchedulersContainer.Config(warmup_steps=min(20, self.steps), decay_ratio=0.5, min_lr_factor=0.1),
            "comm": CommConfig(init_timeout_seconds=120, train_timeout_seconds=60, trace_buf_size=0),
            "checkpoint": CheckpointManager.Config(enable=False, interval=50, keep_latest_k=2, last_save_model_only=False),
            "activation_checkpoint": None,
            "debug": DebugConfig(seed=0),
        }

    def _training(self, batch: int) -> TrainingConfig:
        return TrainingConfig(
            local_batch_size=batch,
            seq_len=self.seq_len,
            steps=self.steps,
            disable_cuda_graphs=True,
            dtype=self.dtype,
            mixed_precision_param=self.dtype,
            mixed_precision_reduce="float32",
        )

    def disaggregated(self, attention: Sequence[int], ffn: Sequence[int]) -> DisagTrainer.Config:
        """Groups of these sizes: ``([2, 2], [1, 1])`` is 4 attention ranks in two groups and 2 FFN ranks in two."""
        common = self._common()
        common["model_spec"].pipelining_fn = split_pipeline
        return DisagTrainer.Config(
            **common,
            disag=DisagConfig(attention=list(attention), ffn=list(ffn)),
            training=self._training(self.sequences),
            parallelism=ParallelismConfig(spmd_backend=spmd_backend(), pipeline_parallel_microbatch_size=self.microbatch),
        )

    def homogeneous(self, *, ranks: int = 1, expert_parallel: int = 1) -> Trainer.Config:
        """The same model and batch on torchtitan's own path."""
        return Trainer.Config(
            **self._common(),
            training=self._training(self.sequences // ranks),
            parallelism=ParallelismConfig(spmd_backend=spmd_backend(), expert_parallel_degree=expert_parallel),
        )
