"""A small qwen3-style MoE on byte text, for the CPU: attention and experts on different ranks, and the same model unsplit.

A name counts pools: ``cpu_4a2f`` is 4 attention and 2 FFN ranks. See README.md in this folder for the lines that start them.
"""

from typing import Any

from recipes.common import Recipe
from torchmoe.titan.model import MoEModel

RECIPE = Recipe(
    name="disag_tiny",
    model=MoEModel(layers=2, dim=128, heads=4, kv_heads=2, head_dim=32, experts=8, top_k=2, expert_dim=256, load_balance=1e-2),
    sequences=32,
    microbatch=8,
    seq_len=128,
    steps=140,
    lr=4e-3,
)


def cpu_1a1f() -> Any:
    return RECIPE.disaggregated([1], [1])


def cpu_2a1f() -> Any:
    return RECIPE.disaggregated([2], [1])


def cpu_1a2f() -> Any:
    return RECIPE.disaggregated([1], [2])


def cpu_2a2f() -> Any:
    return RECIPE.disaggregated([2], [2])


def cpu_3a1f() -> Any:
    return RECIPE.disaggregated([3], [1])


def cpu_4a2f() -> Any:
    """Two groups per role: layers alternate between them."""
    return RECIPE.disaggregated([2, 2], [1, 1])


def homogeneous() -> Any:
    """One process, torchtitan's own path."""
    return RECIPE.homogeneous()


def ep2() -> Any:
    """torchtitan's expert parallelism on 2 ranks."""
    return RECIPE.homogeneous(ranks=2, expert_parallel=2)
