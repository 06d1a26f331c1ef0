"""A recipe of a very small model, for the tests of whole jobs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from recipes.common import Recipe
from torchmoe.titan.model import MoEModel

RECIPE = Recipe(
    name="test",
    model=MoEModel(
        layers=3, dim=32, heads=2, kv_heads=1, head_dim=16, experts=6, expert_dim=24, shared_dim=16, load_balance=1e-2
    ),
    sequences=16,
    microbatch=4,
    seq_len=16,
    steps=6,
    lr=3e-3,
)


def cpu_2a2f() -> Any:
    return RECIPE.disaggregated([2], [2])


def cpu_4a4f() -> Any:
    return RECIPE.disaggregated([1, 1], [1, 1])


def all_options() -> Any:
    """Head on FFN ranks, riding residuals, weight gradients apart, recompute on both roles."""
    from torchtitan.distributed.activation_checkpoint import FullAC

    config = RECIPE.disaggregated([1, 1], [1, 1])
    disag = config.disag
    disag.head, disag.residual, disag.weights_held, disag.save = "ffn", "ride", 2, "input"
    config.activation_checkpoint = FullAC.Config()
    return config


def sharded() -> Any:
    """FSDP2 inside the attention group."""
    config = RECIPE.disaggregated([2], [2])
    config.disag.shard_attention = True
    return config


def homogeneous() -> Any:
    return RECIPE.homogeneous()


def dense_last() -> Any:
    """The last block has no experts."""
    return replace(RECIPE, model=replace(RECIPE.model, dense=(2,))).disaggregated([2], [2])


def tied() -> Any:
    config = RECIPE.disaggregated([1, 1], [1, 1])
    config.model_spec.model.enable_weight_tying = True
    return config


def validated_without_end() -> Any:
    """A validation loader without the option that says whether it ends."""
    from torchtitan.components.validate import Validator

    from torchmoe.titan.data import NoData

    config = RECIPE.disaggregated([2], [2])
    config.validator = Validator.Config(dataloader=NoData.Config())
    return config
