"""Recipes from plans: they load, their degrees are the plan's, and what cannot be run is refused."""

from __future__ import annotations

import importlib.util
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from torchmoe.alloc.allocator import RooflineAllocator
from torchmoe.alloc.colocated import ColocatedCosts
from torchmoe.alloc.emit import emit_recipe, recipe_text
from torchmoe.alloc.models import MoESpec
from torchmoe.alloc.planner import PlanReport, plan
from torchmoe.alloc.presets import cluster_preset, model_preset
from torchmoe.alloc.specs import Workload
from torchmoe.errors import ConfigError

pytest.importorskip("mip", reason="the allocator's solver")

ROOT = Path(__file__).parents[2]
TINY = MoESpec(
    name="tiny", num_layers=4, dim=64, num_heads=4, num_kv_heads=2, head_dim=16, num_experts=8, top_k=2, expert_dim=64,
    vocab_size=256, qk_norm=True,
)  # fmt: skip


def report(**changes: Any) -> PlanReport:
    w = Workload(seq_len=128, micro_batch=1, global_batch=16, dtype="fp32")
    shape = replace(TINY, **changes)
    return plan(cluster_preset("h800x4"), shape, w, modes=[("none", "preact")], micro_batches=(1,))


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
    assert config.override.imports == [("torchmoe.titan.override.grouped_experts", {"save": "preact"})]


def riding(r: PlanReport) -> PlanReport:
    """The report with a split of two groups per role, everything recomputed, the residual on the rows."""
    w = Workload(seq_len=128, micro_batch=1, global_batch=16, dtype="fp32")
    modes: Any = [("full", "input")]
    allocator = RooflineAllocator(
        r.cluster, r.model, w, groups=(2,), residual="ride", memory_modes=modes, micro_batches=(2,), max_replicas=1
    )
    return replace(r, split=allocator.solve())


def test_memory_modes_and_a_riding_residual_are_written(tmp_path: Path) -> None:
    emit_recipe(riding(report()), tmp_path / "mine.py", kind="split")
    config = load(tmp_path / "mine.py").planned()
    assert (config.disag.attention, config.disag.ffn) == ([1, 1], [1, 1])
    assert (config.disag.residual, config.disag.save) == ("ride", "input")
    assert type(config.activation_checkpoint).__qualname__ == "FullAC.Config"


def start(path: Path) -> str:
    """Two steps of an emitted recipe by torchtitan's own entry, one process per GPU of the plan; what it logged."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "-m", "torchtitan.train"]
    command += ["--module", path.stem, "--config", "planned", "--training.steps", "2", "--dump_folder", str(path.parent / "out")]
    env = {**os.environ, "PYTHONPATH": f"{path.parent}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stderr + run.stdout


def losses(log: str) -> list[float]:
    """Of every logged step, in order of the steps (torchtitan logs on the rank that has the loss)."""
    found = dict(re.findall(r"step:\s*(\d+)\s+loss:\s*([0-9.]+)", log))
    return [float(found[k]) for k in sorted(found, key=int)]


def test_an_emitted_split_recipe_trains(tmp_path: Path) -> None:
    pytest.importorskip("torchtitan", reason="runs the recipe")
    emit_recipe(riding(report(shared_dim=32)), tmp_path / "emitted_split.py", kind="split")
    first, second = losses(start(tmp_path / "emitted_split.py"))
    assert first == pytest.approx(math.log(256), rel=0.05) and second < first


def test_an_emitted_colocated_recipe_trains(tmp_path: Path) -> None:
    """PP 2 x EP 2, the first stage recomputed."""
    pytest.importorskip("torchtitan", reason="runs the recipe")
    r = report()
    chosen = next(p for p in r.plans if (p.costs.pp, p.costs.ep) == (2, 2) and p.costs.overlap == "none")
    room = replace(r.cluster, gpu=replace(r.cluster.gpu, hbm_bytes=chosen.stages[0] - 1))
    full = replace(chosen.costs, cluster=room, workload=replace(chosen.costs.workload, recompute="full"))
    path = tmp_path / "emitted_colocated.py"
    path.write_text(recipe_text(r, replace(chosen, costs=full), module=path.stem))
    assert "STAGES_RECOMPUTED = frozenset([0])" in path.read_text()
    first, second = losses(start(path))
    assert first == pytest.approx(math.log(256), rel=0.05) and second < first


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
    for name in ("mine", "my-plan.py", "2.py"):
        with pytest.raises(ConfigError, match="started as a module"):
            emit_recipe(r, tmp_path / name)
    with pytest.raises(ConfigError, match="has MLA"):
        recipe_text(replace(r, model=model_preset("deepseek-v3")), r.plans[0])
    assert r.split is not None
    with pytest.raises(ConfigError, match="dtype fp16"):
        recipe_text(r, replace(r.split, workload=replace(r.split.workload, dtype="fp16")))
    with pytest.raises(ConfigError, match="no split plan"):
        emit_recipe(replace(r, split=None), tmp_path / "mine.py", kind="split")
