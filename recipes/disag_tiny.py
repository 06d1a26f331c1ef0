"""A small qwen3-style MoE on byte text, for the CPU: attention and experts on different ranks, and the same model unsplit.

A name counts pools: ``cpu_4a2f`` is 4 attention and 2 FFN ranks. Start with as many processes as ranks, see README.md here.
"""

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

MODEL = MoEModel(layers=2, dim=128, heads=4, kv_heads=2, head_dim=32, experts=8, top_k=2, expert_dim=256, load_balance=1e-2)
SEQUENCES, MICROBATCH, SEQ_LEN, STEPS = 32, 8, 128, 200


def _common(model: MoEModel) -> dict:
    spec = model_spec(model, name="disag_tiny")
    return {
        "model_spec": spec,
        "loss": CrossEntropyLoss.Config(global_vocab_size=model.vocab),
        "tokenizer": ByteTokenizer.Config(),
        "dataloader": TextDataLoader.Config(),
        "metrics": MetricsProcessor.Config(log_freq=1, disable_color_printing=True),
        "optimizer": default_adamw(lr=4e-3),
        "lr_scheduler": LRSchedulersContainer.Config(warmup_steps=20, decay_ratio=0.5, min_lr_factor=0.1),
        "comm": CommConfig(init_timeout_seconds=120, train_timeout_seconds=60, trace_buf_size=0),
        "checkpoint": CheckpointManager.Config(enable=False, interval=50, last_save_model_only=False),
        "activation_checkpoint": None,
        "debug": DebugConfig(seed=0),
    }


def _training(batch: int, model: MoEModel) -> TrainingConfig:
    return TrainingConfig(
        local_batch_size=batch,
        seq_len=SEQ_LEN,
        steps=STEPS,
        disable_cuda_graphs=True,
        mixed_precision_param="float32",
        mixed_precision_reduce="float32",
    )


def disaggregated(attention: list[int], ffn: list[int], model: MoEModel = MODEL) -> DisagTrainer.Config:
    """Groups of these sizes; ``disaggregated([2, 2], [1, 1])`` is 4 attention ranks in two groups and 2 FFN ranks in two."""
    common = _common(model)
    common["model_spec"].pipelining_fn = split_pipeline
    return DisagTrainer.Config(
        **common,
        disag=DisagConfig(attention=attention, ffn=ffn),
        training=_training(SEQUENCES, model),
        parallelism=ParallelismConfig(spmd_backend=spmd_backend(), pipeline_parallel_microbatch_size=MICROBATCH),
    )


def homogeneous(ranks: int = 1, expert_parallel: int = 1, model: MoEModel = MODEL) -> Trainer.Config:
    """The same model and batch on torchtitan's own path."""
    return Trainer.Config(
        **_common(model),
        training=_training(SEQUENCES // ranks, model),
        parallelism=ParallelismConfig(spmd_backend=spmd_backend(), expert_parallel_degree=expert_parallel),
    )


def cpu_1a1f() -> DisagTrainer.Config:
    return disaggregated([1], [1])


def cpu_2a1f() -> DisagTrainer.Config:
    return disaggregated([2], [1])


def cpu_1a2f() -> DisagTrainer.Config:
    return disaggregated([1], [2])


def cpu_2a2f() -> DisagTrainer.Config:
    return disaggregated([2], [2])


def cpu_3a1f() -> DisagTrainer.Config:
    return disaggregated([3], [1])


def cpu_4a2f() -> DisagTrainer.Config:
    """Two groups per role: layers alternate between them."""
    return disaggregated([2, 2], [1, 1])


def ep2() -> Trainer.Config:
    """torchtitan's expert parallelism on 2 ranks."""
    return homogeneous(ranks=2, expert_parallel=2)
