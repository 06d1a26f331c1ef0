"""Every recipe builds, counts its ranks in its name, and splits over them."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch

from recipes import disag_small, disag_tiny
from torchmoe.titan.split import split_model
from torchmoe.titan.trainer import DisagTrainer, check_config

RECIPES = [
    (module, name)
    for module in (disag_tiny, disag_small)
    for name, fn in inspect.getmembers(module, inspect.isfunction)
    if fn.__module__ == module.__name__
]


@pytest.mark.parametrize("module, name", RECIPES, ids=lambda v: v if isinstance(v, str) else v.__name__)
def test_a_recipe_is_valid_and_its_name_counts_its_pools(module: Any, name: str) -> None:
    config = getattr(module, name)()
    pools = re.fullmatch(r"[cg]pu_(\d+)a(\d+)f", name)
    assert isinstance(config, DisagTrainer.Config) == bool(pools)
    if pools:
        placement = check_config(config)
        assert (sum(placement.attention), sum(placement.ffn)) == (int(pools[1]), int(pools[2]))


def test_the_tiny_model_has_the_promised_size() -> None:
    config = disag_tiny.cpu_2a2f()
    with torch.device("meta"):
        model = config.model_spec.model.build()
    assert 1e6 <= sum(p.numel() for p in model.parameters()) <= 3e6
    router = config.model_spec.model.layers[0].moe.router
    assert router.num_experts >= 8 and router.top_k == 2


def test_the_recipe_for_eight_gpus_splits_on_the_meta_device() -> None:
    """Nothing of it has run on GPUs: this checks shapes, owners and the schedule."""
    config = disag_small.gpu_5a3f()
    placement = check_config(config)
    assert placement.world_size == 8
    assert [len(placement.local_experts(0, i)) for i in range(3)] == [22, 21, 21]
    with torch.device("meta"):
        whole = sum(p.numel() for p in config.model_spec.model.build().parameters())
    assert 1.7e9 < whole < 1.8e9
    sizes = []
    for rank in range(8):
        with torch.device("meta"):
            model = config.model_spec.model.build()
        part, stages, _ = split_model(model, placement, placement.where(rank), loss_fn=None)
        assert all(p.is_meta for p in part.parameters())
        assert len(stages.attention) == (11 if rank < 5 else 0) and len(stages.experts) == (0 if rank < 5 else 11)
        sizes.append(sum(p.numel() for p in part.parameters()))
    assert len(set(sizes[:5])) == 1 and sizes[0] + sum(sizes[5:]) == whole
