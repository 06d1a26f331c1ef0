"""A 1.7 B parameter qwen3-style MoE for one node of 8 GPUs. Built on the meta device by the tests; not yet run over NCCL."""

from typing import Any

from recipes.common import Recipe
from torchmoe.titan.model import MoEModel

RECIPE = Recipe(
    name="disag_small",
    model=MoEModel(
        layers=12,
        dim=1024,
        heads=16,
        kv_heads=4,
        head_dim=64,
        experts=64,
        top_k=4,
        expert_dim=768,
        shared_dim=768,
        dense=(0,),
        dense_dim=4096,
    ),
    sequences=80,
    microbatch=10,
    seq_len=2048,
    steps=10_000,
    lr=3e-4,
    dtype="bfloat16",
)


def gpu_5a3f() -> Any:
    """5 attention and 3 FFN ranks; 64 experts over 3 ranks is 22 + 21 + 21."""
    return RECIPE.disaggregated([5], [3])


def gpu_4a4f() -> Any:
    """Two groups per role of 2 ranks each."""
    return RECIPE.disaggregated([2, 2], [2, 2])
