"""Local search measured by a real run: seconds of steps under an allocation's groups, and what cannot run is a failed trial."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from torchmoe.alloc.allocator import RooflineAllocator
from torchmoe.alloc.models import MoESpec
from torchmoe.alloc.presets import cluster_preset
from torchmoe.alloc.search import search_allocations
from torchmoe.alloc.specs import Workload
from torchmoe.errors import ConfigError

pytest.importorskip("torchtitan", reason="times steps of a recipe")
pytest.importorskip("mip", reason="the allocator's solver")

from tests.e2e.recipe import RECIPE
from torchmoe.titan.model import model_spec
from torchmoe.titan.timed import TimedRun


def allocator() -> RooflineAllocator:
    work = Workload(seq_len=16, micro_batch=2, global_batch=8, dtype="fp32")
    shape = MoESpec.from_torchtitan(model_spec(RECIPE.model))
    return RooflineAllocator(cluster_preset("h800x3"), shape, work, groups=(1,), max_replicas=1, tie=1e-6)


def test_the_search_measures_real_steps_and_keeps_the_fastest(tmp_path: Path) -> None:
    run, path = TimedRun("tests.e2e.recipe", "cpu_2a2f", steps=2), tmp_path / "history.json"
    _, seed = search_allocations(allocator(), run, trials=0, radius=1, path=path)
    assert 0 < seed.seconds < 60
    # goes on from the history: the seed is not run again, and a neighbour that would be faster is kept
    best, result = search_allocations(allocator(), lambda a: seed.seconds / 2, trials=1, radius=1, path=path)
    assert result.history[0] == seed.history[0] and result.gain == 2
    assert (best.m, best.n) == (result.best.m, result.best.n) != (seed.best.m, seed.best.n)


def test_what_the_recipe_cannot_run_is_refused_with_its_reason() -> None:
    best = allocator().solve()
    with pytest.raises(ConfigError, match="micro-batch of 1 sequences"):
        TimedRun("tests.e2e.recipe", "cpu_2a2f")(replace(best, m=2, n=1, gpus=3, workload=replace(best.workload, micro_batch=1)))
    with pytest.raises(ConfigError, match="steps=0"):
        TimedRun("tests.e2e.recipe", "cpu_2a2f", steps=0)
