"""The planner: five constraints each with its reason, memory per stage, bottlenecks, capacity; and the command line."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from torchmoe.__main__ import main
from torchmoe.alloc.colocated import ColocatedCosts
from torchmoe.alloc.planner import capacity, plan
from torchmoe.alloc.presets import cluster_preset, model_preset
from torchmoe.alloc.roofline import Roofline
from torchmoe.alloc.search import Trial, local_search, search_allocations
from torchmoe.alloc.specs import Workload
from torchmoe.costs import piper
from torchmoe.errors import ConfigError

pytest.importorskip("mip", reason="the allocator's solver")

FRONTIER = cluster_preset("frontierx64")
MEDIUM = model_preset("xmoe-medium")
WORK = Workload(seq_len=4096, micro_batch=1, global_batch=512, dtype="fp16")


def test_every_strategy_is_ranked_or_rejected_with_a_reason() -> None:
    report = plan(FRONTIER, MEDIUM, WORK, overlap=("none",), split=False)
    mine = {(p.costs.pp, p.costs.ep, p.costs.dp) for p in report.plans}
    no = {(r.pp, r.ep, r.dp): r for r in report.rejected}
    divisors = [d for d in range(1, 65) if 64 % d == 0]
    every = {(pp, ep, 64 // pp // ep) for pp in divisors for ep in divisors if 64 % (pp * ep) == 0}
    assert mine | set(no) == every and not mine & set(no)
    steps = [p.step for p in report.plans]
    assert steps == sorted(steps)
    for (pp, ep, _), r in no.items():
        broken = {
            "EP divides E": MEDIUM.num_experts % ep != 0,
            "PP within layers": pp > MEDIUM.num_layers,
            "EP in the fast domain": ep > 32,
            "sequences": False,
            "memory": True,
        }
        assert broken[r.constraint] and r.reason
    for p in report.plans:
        assert max(p.stages) == p.memory.total <= FRONTIER.gpu.hbm_bytes
        assert p.costs.ep <= FRONTIER.fast_domain == 32
        assert 0 < p.mfu < 1
        assert p.step == pytest.approx(p.parts.total)
        assert set(p.lost) == {"all-to-all latency", "missing overlap", "skinny GEMMs", "placement"}


def test_the_first_stage_holds_the_most_under_equal_stages() -> None:
    c = ColocatedCosts(FRONTIER, replace(MEDIUM, num_layers=32), replace(WORK, micro_batch=8), 8, 8)
    totals = [c.memory(i).activations for i in range(8)]
    assert totals == sorted(totals, reverse=True)
    assert totals[0] == pytest.approx(8 * totals[7])


def test_paper_memory_is_the_printed_formula() -> None:
    c = ColocatedCosts(FRONTIER, MEDIUM, replace(WORK, micro_batch=8), 4, 8, 2)
    model = piper.PiperModel(
        dim=5120, num_layers=28, num_experts=128, top_k=6, num_heads=40, expert_dim=1536, batch=c.micro_batches * 8, seq_len=4096
    )
    assert c.paper_memory(2) == piper.memory_1f1b(model, pp=4, ep=8, micro_batches=c.micro_batches, stage=2)


def test_overlap_hides_and_halo_beats_flat_where_messages_are_many() -> None:
    c = ColocatedCosts(FRONTIER, MEDIUM, replace(WORK, seq_len=64, micro_batch=32), 2, 32)
    assert c.exchange("halo").latency < c.exchange("flat").latency
    assert c.exchange("halo").total < c.exchange("flat").total
    assert replace(c, ep=1).exchange().total == 0
    assert c.exchange(one_node=True).network == 0
    hidden = c.with_overlap().step()
    assert hidden.total < c.step().total
    assert hidden.hidden <= min(hidden.exchange, hidden.compute) + 1e-12


def test_more_data_parallel_copies_where_expert_parallelism_would_leave_the_domain() -> None:
    big = cluster_preset("frontierx512")
    report = plan(big, model_preset("xmoe-small"), replace(WORK, global_batch=2048), overlap=("none",), split=False)
    assert max(p.costs.ep for p in report.plans) <= 32
    assert any(p.costs.dp > 1 for p in report.plans[:3])


def test_capacity_is_the_last_that_fits_and_names_what_stops_the_next() -> None:
    options = {"overlap": ("none",), "split": False, "micro_batches": (1,)}
    c = capacity(FRONTIER, MEDIUM, WORK, **options)  # type: ignore[arg-type]
    assert c.model is not None and c.plan is not None
    assert c.next_model.num_experts == 2 * c.model.num_experts
    assert plan(FRONTIER, c.model, WORK, **options).plans  # type: ignore[arg-type]
    assert not plan(FRONTIER, c.next_model, WORK, **options).plans  # type: ignore[arg-type]
    assert c.stopped_by == "memory" and "GiB" in c.reason
    layers = capacity(FRONTIER, MEDIUM, WORK, grow="layers", **options)  # type: ignore[arg-type]
    assert layers.model is not None and layers.model.num_layers >= MEDIUM.num_layers
    none = capacity(cluster_preset("frontierx1"), model_preset("deepseek-v3"), WORK, **options)  # type: ignore[arg-type]
    assert none.model is None and none.next_model == model_preset("deepseek-v3")


def test_nothing_fits_says_which_constraints_removed_what() -> None:
    report = plan(cluster_preset("h800x8"), model_preset("deepseek-v3"), replace(WORK, dtype="bf16"))
    with pytest.raises(ConfigError, match=r"fits no strategy on 8 GPUs \(memory"):
        report.best  # noqa: B018


# ---- roofline
def test_a_split_moves_the_turning_points_apart() -> None:
    cluster, w = cluster_preset("h800x32"), Workload(seq_len=4096, micro_batch=8, global_batch=256)
    r = Roofline(cluster, model_preset("qwen3-235b"), w, 20, 12, 16, 16)
    a, f = r.point("attention", "split", 4096), r.point("experts", "split", 4096)
    base_a, base_f = r.point("attention", "aggregated", 4096), r.point("experts", "aggregated", 4096)
    assert a.turning_point == pytest.approx(base_a.turning_point * 20 / 16)
    assert f.turning_point == pytest.approx(base_f.turning_point * 12 / 16)
    paper = replace(r, mode="paper")
    assert paper.point("attention", "split", 4096).turning_point == pytest.approx(19780 * 40 / 32)
    assert round(paper.point("attention", "aggregated", 8192).intensity) == 2592
    long, short = (r.point("attention", "split", s) for s in (65536, 4096))
    assert short.bound == "network" and long.bound == "compute"
    assert long.attained == long.ceiling > short.attained
    assert f.intensity == r.point("experts", "split", 32768).intensity
    with pytest.raises(ConfigError, match="nics_f=0"):
        replace(r, nics_f=0)


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_every_picture_is_drawn_and_is_the_same_again(tmp_path: Path, capsys: pytest.CaptureFixture[str], ending: str) -> None:
    pytest.importorskip("matplotlib", reason="draws")
    lines = {
        "plan": ["plan", "--cluster", "h200x8", "--model", "qwen3-30b", "--batch", "64"],
        "lengths": ["plan", "--cluster", "h200x8", "--model", "qwen3-30b", "--batch", "64", "--lengths", "4096,8192"],
        "capacity": ["capacity", "--cluster", "frontierx8", "--model", "xmoe-small", "--batch", "32"],
        "roofline": ["roofline", "--cluster", "h800x32", "--model", "qwen3-235b", "--split", "20:12", "--nics", "16:16"],
    }
    if ending == "png":
        lines["simulate"] = ["simulate", "--cluster", "h800x16", "--model", "deepseek-moe", "--batch", "64"]
    for name, line in lines.items():
        files = [tmp_path / f"{name}{i}.{ending}" for i in range(2 if name == "plan" else 1)]
        for file in files:
            assert main([*line, "--plot", str(file)]) == 0
            assert f"wrote {file}" in capsys.readouterr().out
        seen = [f.read_bytes() for f in files]
        assert all(b == seen[0] for b in seen) and len(seen[0]) > 5000
        assert seen[0].startswith(b"\x89PNG" if ending == "png" else b"<?xml")


def test_plots_that_cannot_be_drawn_are_refused_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = ["plan", "--cluster", "h200x8", "--model", "qwen3-30b", "--batch", "64", "--plot"]
    for file, text in ((tmp_path / "x.bmp", ".png, .svg, .pdf"), (tmp_path / "no" / "x.png", "there is no folder")):
        assert main([*line, str(file)]) == 2
        out = capsys.readouterr()
        assert text in out.err and not out.out
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main([*line, str(tmp_path / "x.png")]) == 2
    assert "torchmoe[viz]" in capsys.readouterr().err


# ---- local search
def grid(size: int) -> list[Trial]:
    return [Trial(m, n, m, n) for m in range(1, size) for n in range(1, size)]


def test_the_search_finds_the_best_within_its_radius_and_never_measures_twice() -> None:
    seen: list[Trial] = []

    def measure(t: Trial) -> float:
        seen.append(t)
        return 1 + abs(t.m - 6) + abs(t.n - 3)

    r = local_search(Trial(5, 4, 5, 4), grid(9), measure, trials=100, radius=1)
    assert r.best == Trial(6, 3, 6, 3) and r.seconds == 1 and r.gain == 3
    assert len(seen) == len(set(seen)) == 9 and seen[0] == Trial(5, 4, 5, 4)
    few = local_search(Trial(5, 4, 5, 4), grid(9), measure, trials=3, radius=2)
    assert len(few.history) == 4


def test_an_interrupted_search_resumes_where_it_stopped(tmp_path: Path) -> None:
    path, calls = tmp_path / "history.json", []

    def measure(t: Trial) -> float:
        calls.append(t)
        if len(calls) == 4:
            raise RuntimeError("power cut")
        return float(t.m + t.n)

    with pytest.raises(RuntimeError, match="power cut"):
        local_search(Trial(4, 4, 4, 4), grid(9), measure, trials=6, radius=2, path=path)
    r = local_search(Trial(4, 4, 4, 4), grid(9), measure, trials=6, radius=2, path=path)
    assert len(calls) == 4 + 4  # three of seven were done, one was cut off
    whole = local_search(Trial(4, 4, 4, 4), grid(9), lambda t: float(t.m + t.n), trials=6, radius=2)
    assert r == whole
    with pytest.raises(ConfigError, match="belongs to a search around"):
        local_search(Trial(3, 4, 3, 4), grid(9), measure, trials=1, radius=1, path=path)
    path.write_text("{}")
    with pytest.raises(ConfigError, match="not a search history"):
        local_search(Trial(4, 4, 4, 4), grid(9), measure, trials=1, radius=1, path=path)


def test_failed_trials_are_recorded_and_a_failed_seed_is_an_error() -> None:
    def measure(t: Trial) -> float:
        if t.m > 4:
            raise ConfigError("does not fit")
        return 1.0

    r = local_search(Trial(4, 4, 4, 4), grid(9), measure, trials=100, radius=1)
    assert sum(s == float("inf") for _, s in r.history) == 3
    with pytest.raises(ConfigError, match="does not fit"):
        local_search(Trial(5, 5, 5, 5), grid(9), measure, trials=1, radius=1)
    with pytest.raises(ConfigError, match="returned 0"):
        local_search(Trial(4, 4, 4, 4), grid(9), lambda t: 0.0, trials=1, radius=1)
    with pytest.raises(ConfigError, match="radius=0"):
        local_search(Trial(4, 4, 4, 4), grid(9), measure, trials=1, radius=0)


def test_searching_measured_allocations_never_ends_behind_the_seed() -> None:
    from torchmoe.alloc.allocator import RooflineAllocator
    from torchmoe.alloc.simulated import simulate_allocation

    w = Workload(seq_len=4096, micro_batch=8, global_batch=128)
    model = replace(model_preset("deepseek-moe"), num_layers=4)
    a = RooflineAllocator(cluster_preset("h800x16"), model, w, even_sequences=False, groups=(1,), max_replicas=1)
    best, r = search_allocations(a, lambda x: simulate_allocation(a, x).makespan, trials=5, radius=2)
    assert len(r.history) == 6
    assert r.seconds == min(s for _, s in r.history) and r.gain >= 1
    assert (best.m, best.n) == (r.best.m, r.best.n)


# ---- command line
def test_plan_prints_an_answer_and_json_is_complete(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["plan", "--cluster", "h200x8", "--model", "qwen3-30b", "--batch", "64", "--simulate"]
    assert main(line) == 0
    text = capsys.readouterr().out
    assert "fastest:" in text and "binds:" in text and "simulated;" in text and "assumed shares" in text
    assert main([*line, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["plans"] and data["rejected"] and data["disaggregated"]["placement"]["attention"]
    assert data["disaggregated"]["simulated"] == data["disaggregated"]["step"] > 0


def test_other_commands_answer(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    common = ["--cluster", "h800x32", "--model", "deepseek-moe"]
    assert main(["roofline", *common, "--split", "20:12", "--nics", "16:16"]) == 0
    assert "turning point" in capsys.readouterr().out
    assert main(["plan", *common, "--batch", "256", "--lengths", "4096,16384", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [r["seq_len"] for r in rows] == [4096, 16384]
    assert main(["capacity", "--cluster", "frontierx8", "--model", "xmoe-small", "--batch", "32"]) == 0
    assert "stopped by memory" in capsys.readouterr().out


def test_simulate_compares_schedules(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--cluster", "h800x32", "--model", "deepseek-moe", "--batch", "128", "--json"]) == 0
    rows = {r["scheme"]: r for r in json.loads(capsys.readouterr().out)}
    assert set(rows) > {"1F1B blocking", "1F1B dualpipe", "AF-Pipe"}
    assert rows["1F1B blocking"]["step"] > rows["1F1B dualpipe"]["step"] >= rows["1F1B dualpipe"]["bound"]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (["plan", "--cluster", "h800x12", "--model", "qwen3-30b"], "not whole nodes"),
        (["plan", "--cluster", "h800x8", "--model", "nothing"], "no model preset"),
        (["plan", "--cluster", "h800x8", "--model", "deepseek-v3"], "fits no strategy"),
        (["plan", "--cluster", "missing.json", "--model", "qwen3-30b"], "cannot read missing.json"),
        (["plan", "--cluster", "h800x8", "--model", "qwen3-30b", "--profile", "none.json"], "none.json"),
        (["roofline", "--cluster", "h800x8", "--model", "qwen3-30b", "--split", "8"], "--split"),
        (["simulate"], "--preset"),
        (["simulate", "--preset", "128-h800", "--seq", "0"], "seq_len=0"),
        (["plan", "--cluster", "h800x0", "--model", "qwen3-30b"], "no cluster preset"),
        (["plan", "--cluster", "h800x²", "--model", "qwen3-30b"], "no cluster preset"),
        (["plan", "--cluster", "h800x99999992", "--model", "qwen3-30b"], "at most 10 million"),
        (["plan", "--cluster", "h800x8", "--model", "qwen3-30b", "--batch", "0"], "global_batch=0"),
        (["plan", "--cluster", "h800x8", "--model", "qwen3-30b", "--batch", "64", "--micro", "3"], "--micro 3"),
        (["plan", "--cluster", "h800x8", "--model", "qwen3-30b", "--batch", "64", "--lengths", "0"], "--lengths '0'"),
        (["plan", "--cluster", "h800x8", "--model", "qwen3-30b", "--dtype", "int4"], "no peak for dtype 'int4'"),
        (["plan", "--cluster", "h800x8", "--model", "qwen3-30b", "--top", "0"], "--top 0"),
        (["plan", "--cluster", "h800x8", "--model", "qwen3-30b", "--emit", "x.txt"], "started as a module"),
        (["plan", "--cluster", "h800x8", "--model", "qwen3-30b", "--lengths", "4096", "--emit", "x.py"], "there is no one plan"),
        (["plan", "--cluster", "h800x8", "--model", "xmoe-small", "--batch", "64", "--save", "half"], "save='half'"),
        (["roofline", "--cluster", "h800x8", "--model", "qwen3-30b", "--split", "nan:1"], "positive numbers"),
        (["roofline", "--cluster", "h800x8", "--model", "qwen3-30b", "--split", "1.5:2"], "whole GPUs"),
        (["roofline", "--cluster", "h800x8", "--model", "qwen3-30b", "--split", "20:12"], "together at most 8"),
        (["capacity", "--cluster", "h800x1", "--model", "deepseek-v3", "--batch", "8"], "itself does not fit"),
        (["profile", "--out", "missing/platform.json"], "cannot write"),
    ],
)
def test_refused_inputs_are_one_line_and_exit_2(line: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line) == 2
    err = capsys.readouterr().err
    assert err.startswith("torchmoe: ") and text in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"colour": "red"}, "no key 'colour'"),
        ({"nics_per_node": 0}, "nics_per_node=0 cannot reach"),
        ({"nics_per_node": "8"}, "nics_per_node='8' must be a whole number"),
        ({"nic_bandwidth": 400}, "has no unit"),
        ({"nic_bandwidth": None}, "not a quantity"),
        ({"intra_bandwidth": "5 us"}, "is not a unit of bytes/s"),
        ({"gpu": 5}, "not from 5"),
        ({"gpu": "h900"}, "no GPU preset"),
        ({"nodes": 2.5}, "must be a whole number"),
        ({"nodes": True}, "must be a whole number"),
        ({"network_efficiency": "much"}, "must be a number"),
        ({"name": None}, "must be text"),
        ({"reserved_bytes": "200 GiB"}, "leaves nothing"),
    ],
)
def test_a_wrong_cluster_file_is_refused_in_one_line(
    change: dict[str, object], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({**cluster_preset("h800x16").to_dict(), **change}))
    assert main(["plan", "--cluster", str(file), "--model", "qwen3-30b", "--batch", "64"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("torchmoe: ") and text in err and err.count("\n") == 1


def test_a_node_alone_needs_no_nic() -> None:
    alone = replace(cluster_preset("h200x8"), nics_per_node=0, nic_bandwidth=0.0)
    w = Workload(seq_len=4096, micro_batch=1, global_batch=64)
    plans = [plan(c, model_preset("qwen3-30b"), w, split=False).plans for c in (alone, cluster_preset("h200x8"))]
    assert [p.step for p in plans[0]] == [p.step for p in plans[1]] != []


def test_files_that_are_no_text_or_no_model_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    binary, listed, model = tmp_path / "b.json", tmp_path / "l.yaml", tmp_path / "m.json"
    binary.write_bytes(bytes(range(128, 256)))
    listed.write_text("- 1\n- 2\n")
    good = {"name": "x", "num_layers": 2, "dim": 64, "num_heads": 4, "num_experts": 8, "top_k": 2, "expert_dim": 64}
    for change, text in (
        ({"windows": 5}, "windows=5 must be a list"),
        ({"top_k": "2"}, "must be a whole"),
        ({"top_k": 9}, "top_k=9"),
    ):
        model.write_text(json.dumps({**good, **change}))
        assert main(["plan", "--cluster", "h800x8", "--model", str(model), "--batch", "64"]) == 2
        assert text in capsys.readouterr().err
    hf = {"model_type": "mixtral", "hidden_size": 64, "num_attention_heads": 0}
    model.write_text(json.dumps(hf))
    for line, text in (
        (["--cluster", str(binary), "--model", "qwen3-30b"], "is not text"),
        (["--cluster", str(listed), "--model", "qwen3-30b"], "not a mapping"),
        (["--cluster", "h800x8", "--model", "qwen3-30b", "--profile", str(binary)], "is not text"),
        (["--cluster", "h800x8", "--model", str(model)], "num_attention_heads=0"),
    ):
        assert main(["plan", *line, "--batch", "64"]) == 2
        assert text in capsys.readouterr().err


def test_a_profile_of_another_dtype_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = [[1.0, 0.5]]
    kernels = {"attention 64": one, "gemm": one, "grouped_gemm": one}
    data = {
        "torchmoe_profile": 2,
        "device": "x",
        "dtype": "fp32",
        "peak": "1e9 FLOP/s",
        "kernels": kernels,
        "links": {},
        "fits": [],
    }
    file = tmp_path / "p.json"
    file.write_text(json.dumps({**data, "environment": {}}))
    line = ["plan", "--cluster", "h800x8", "--model", "qwen3-30b", "--batch", "64", "--profile", str(file)]
    assert main(line) == 2
    assert "--dtype fp32" in capsys.readouterr().err
    assert main([*line, "--dtype", "fp32"]) == 0
    assert "measured on x in fp32" in capsys.readouterr().out


def test_a_solver_out_of_time_says_its_gap() -> None:
    from torchmoe.alloc.allocator import RooflineAllocator

    w = Workload(seq_len=4096, micro_batch=8, global_batch=256)
    a = RooflineAllocator(cluster_preset("h800x16"), model_preset("deepseek-moe"), w).solve()
    assert "stopped early" not in a.explain()
    assert "at most 5.00% from the best" in replace(a, gap=0.05).explain()
