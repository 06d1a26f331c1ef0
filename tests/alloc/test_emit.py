"""Recipes from plans: they load, their degrees are the plan's, and what cannot be run is refused."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from torchmoe.alloc.colocated import ColocatedCosts
from torchmoe.alloc.emit import emit_recipe, recipe_text
from torchmoe.alloc.models import MoESpec
from torchmoe.alloc.planner import PlanReport, plan
from torchmoe.alloc.presets import cluster_preset, model_preset
from torchmoe.alloc.specs import Workload
from torchmoe.errors import ConfigError

pytest.importorskip("mip", reason="the allocator's solver")

TINY = MoESpec(
    name="tiny", num_layers=4, dim=64, num_heads=4, num_kv_heads=2, head_dim=16, num_experts=8, top_k=2, expert_dim=64,
    vocab_size=256, qk_norm=True,
)  # fmt: skip


def report(**changes: Any) -> PlanReport:
    w = Workload(seq_len=128, micro_batch=1, global_batch=16, dtype="fp32")
    return plan(cluster_preset("h800x4"), TINY, replace(w, **changes), modes=[("none", "preact")], micro_batches=(1,))


def load(path: Path) -> Any:
    pytest.importorskip("torchtitan", reason="recipes are torchtitan configurations")
    spec = importlib.util.spec_from_file_location("emitted", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_split_plan_becomes_a_recipe_with_its_groups(tmp_path: Path) -> None:
    r = report()
    assert r.split is not None
    emit_recipe(r, tmp_path / "mine.py", kind="split")
    module = load(tmp_path / "mine.py")
    config = module.planned()
    a = r.split
    assert (config.disag.attention, config.disag.ffn) == (a.attention_sizes, a.ffn_sizes)
    assert (config.disag.replicas, config.disag.cycle) == (a.replicas, a.cycle)
    assert config.training.local_batch_size == 16
    assert config.parallelism.pipeline_parallel_microbatch_size == a.workload.micro_batch * a.replicas
    import torch

    from torchmoe.titan.trainer import placement_of

    assert placement_of(config).world_size == a.gpus
    with torch.device("meta"):
        n = sum(p.numel() for p in config.model_spec.model.build().parameters())
    assert n == TINY.num_params


def test_a_colocated_plan_becomes_a_recipe_with_its_degrees(tmp_path: Path) -> None:
    r = report()
    best = next(p for p in r.plans if p.costs.overlap == "none")
    emit_recipe(r, tmp_path / "mine.py", kind="colocated")
    config = load(tmp_path / "mine.py").planned()
    c = best.costs
    assert config.parallelism.pipeline_parallel_degree == c.pp
    assert config.parallelism.expert_parallel_degree == c.ep
    assert config.training.local_batch_size == 16 // (c.ep * c.dp)
    assert config.activation_checkpoint is None


def test_recomputation_is_emitted_for_the_stages_that_need_it(tmp_path: Path) -> None:
    cluster = cluster_preset("h800x8")
    shape = replace(TINY, num_layers=8, dim=2048, num_heads=16, head_dim=128, expert_dim=1024)
    w = Workload(seq_len=16384, micro_batch=1, global_batch=64)
    plain = ColocatedCosts(cluster, shape, replace(w, micro_batch=2), 4, 2)
    full = replace(plain, workload=replace(plain.workload, recompute="full"))
    need = [max(c.memory(i).total for i in range(4)) for c in (plain, full)]
    small = replace(cluster, gpu=replace(cluster.gpu, hbm_bytes=(need[0] + need[1]) / 2))
    modes: Any = [("none", "preact"), ("full", "preact")]
    r = plan(small, shape, w, modes=modes, micro_batches=(1,), split=False, overlap=("none",))
    chosen = next(p for p in r.plans if (p.costs.pp, p.costs.ep, p.costs.dp) == (4, 2, 1))
    assert chosen.costs.workload.recompute == "full"
    text = recipe_text(r, chosen)
    stages = eval(text.split("STAGES_RECOMPUTED = frozenset(")[1].split(")")[0])
    assert stages and stages == list(range(len(stages)))  # the first stages
    (tmp_path / "mine.py").write_text(text)
    config = load(tmp_path / "mine.py").planned()
    assert config.activation_checkpoint is not None


def test_what_cannot_run_is_refused_with_the_reason(tmp_path: Path) -> None:
    r = report()
    with pytest.raises(ConfigError, match="cannot write"):
        emit_recipe(r, tmp_path / "no" / "mine.py")
    with pytest.raises(ConfigError, match="has MLA"):
        recipe_text(replace(r, model=model_preset("deepseek-v3")), r.plans[0])
    assert r.split is not None
    with pytest.raises(ConfigError, match="recompute=full"):
        recipe_text(r, replace(r.split, workload=replace(r.split.workload, recompute="full")))
    with pytest.raises(ConfigError, match="dtype fp16"):
        recipe_text(r, replace(r.split, workload=replace(r.split.workload, dtype="fp16")))
    with pytest.raises(ConfigError, match="no split plan"):
        emit_recipe(replace(r, split=None), tmp_path / "mine.py", kind="split")
