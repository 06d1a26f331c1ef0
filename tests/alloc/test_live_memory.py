"""Predicted memory against the main job: live tensor bytes of every rank during a step of ``recipes.disag_tiny:cpu_2a2f``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchmoe.costs import live_units_af, rows_per_token
from torchmoe.costs.experts import BLOCK_ROWS
from torchmoe.costs.memory import FP32, attention_rank_memory, expert_rank_memory, expert_rank_peak
from torchmoe.pipeline.action import Op
from torchmoe.pipeline.schedules.afpipe import AFPipeSchedule

ROOT = Path(__file__).parent.parent.parent


def test_peak_live_bytes_of_the_main_job_are_predicted(tmp_path: Path) -> None:
    """State to the byte, and state plus what a step adds within 10 %: each attention rank; each expert rank, given the rows and
    pairs that the routing gave it; and the mean of the expert ranks without them."""
    pytest.importorskip("torchtitan", reason="runs the main job's recipe")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    command += [str(Path(__file__).parent / "live_worker.py"), "recipes.disag_tiny", "cpu_2a2f", str(tmp_path)]
    command += ["--training.steps", "2", "--dump_folder", str(tmp_path / "out")]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    seen = [json.loads((tmp_path / f"{r}.json").read_text()) for r in range(4)]

    from recipes.disag_tiny import RECIPE, cpu_2a2f
    from torchmoe.alloc.models import MoESpec
    from torchmoe.titan.model import model_spec
    from torchmoe.titan.trainer import placement_of

    shape = MoESpec.from_torchtitan(model_spec(RECIPE.model))
    batches = RECIPE.sequences // RECIPE.microbatch
    tokens = RECIPE.microbatch * RECIPE.seq_len
    rows = rows_per_token(8, 2, [4, 4])
    live = {role: live_units_af(num_layers=2, pa=1, pf=1, role=role, micro_batches=batches) for role in ("attention", "ffn")}
    a = attention_rank_memory(
        shape, layers=2, embedding=True, head=True, tokens=tokens / 2, live_units=live["attention"], rows_per_token=rows,
        precision=FP32, fused_norm=False,
    )  # fmt: skip
    f = expert_rank_memory(
        shape, layers=2, experts=4, rows=tokens * rows / 2, pairs=tokens, live_units=live["ffn"], precision=FP32
    )
    for rank in seen[:2]:
        assert rank["state"] == a.weights + a.optimizer
        assert rank["state"] + rank["peak"] == pytest.approx(a.total, rel=0.1)
    schedule = AFPipeSchedule(placement_of(cpu_2a2f()), batches)
    order = [("F" if x.op is Op.FORWARD else "B", x.stage // 2, x.microbatch) for x in schedule.lists["F0"]]
    for rank in seen[2:]:
        assert rank["state"] == f.weights + f.optimizer
        forwards = [(layer, mb) for op, layer, mb in order if op == "F"]
        loads = dict(zip(forwards, rank["loads"], strict=True))
        peak = expert_rank_peak(shape, layers=2, experts=4, order=order, loads=loads, scratch_rows=BLOCK_ROWS)  # type: ignore[arg-type]
        assert rank["state"] + rank["peak"] == pytest.approx(peak, rel=0.1)
    # the routing of the first steps is far from even: the mean load alone says nothing about one rank
    loaded = [sum(pairs for _, pairs in r["loads"]) for r in seen[2:]]
    assert max(loaded) > 1.1 * min(loaded)
    mean = sum(r["state"] + r["peak"] for r in seen[2:]) / 2
    assert mean == pytest.approx(f.total, rel=0.1)
