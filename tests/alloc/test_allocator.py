"""The allocator's answer: equal to trying all layouts, explained, within memory, and what it does when nothing fits."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from torchmoe.alloc.allocator import MEMORY_MODES, Allocation, RooflineAllocator
from torchmoe.alloc.models import MoESpec
from torchmoe.alloc.presets import cluster_preset, gpu_preset, model_preset
from torchmoe.alloc.simulated import links_of, placement_of, refine, simulate_allocation
from torchmoe.alloc.specs import ClusterSpec, Workload
from torchmoe.errors import ConfigError
from torchmoe.pipeline.schedules.afpipe import AFPipeSchedule, live_units
from torchmoe.placement import Placement

pytest.importorskip("mip", reason="the allocator's solver")

SMALL = MoESpec(
    name="small", num_layers=8, dim=1024, num_heads=16, num_kv_heads=4, num_experts=32, top_k=4, expert_dim=1024, vocab_size=32000
)


def allocator(gpus: int = 16, **changes: object) -> RooflineAllocator:
    w = Workload(seq_len=4096, micro_batch=8, global_batch=256)
    return replace(RooflineAllocator(cluster_preset(f"h800x{gpus}"), SMALL, w), **changes)  # type: ignore[arg-type]


def brute_force(a: RooflineAllocator) -> tuple[float, int]:
    """(T, fewest GPUs within the tie) from the allocator's cost model alone, layouts and sizes tried one by one."""
    costs, found = a.costs, []
    w = a.workload
    for r in range(1, w.global_batch // w.micro_batch + 1):
        if (w.global_batch // w.micro_batch) % r:
            continue
        for p in a.groups:
            for m in range(1, w.micro_batch + 1):
                for n in range(1, SMALL.num_experts + 1):
                    if w.micro_batch % m or p > SMALL.num_layers or r * p * (m + n) > a.world:
                        continue
                    best = None
                    for cycle in (4 * p, 2 * p):
                        c = replace(costs, cycle=cycle)
                        attention = c.attention_memory(pa=p, pf=p, m=m, n=n, replicas=r).total
                        experts = c.expert_memory(pa=p, pf=p, n=n, replicas=r).total
                        if max(attention, experts) <= a.cluster.gpu.hbm_bytes:
                            best = c
                            break
                    if best is None:
                        continue
                    layers = -(-SMALL.num_layers // p)
                    steps = w.global_batch // w.micro_batch // r
                    band, per = best.link(a.cluster)
                    out_a, out_f = best.wire_bytes(n, p)
                    t = max(
                        best.attention_group_seconds(p, m),
                        layers * best.expert_seconds(n),
                        layers * out_a / (band * per * m),
                        layers * out_f / (band * per * n),
                    )
                    fill = max(1, 3 * p / steps) + (2 * p - 1) / (steps * layers)
                    found.append((t * steps * fill, r * p * (m + n)))
    least = min(t for t, _ in found)
    return least, min(g for t, g in found if t <= least * (1 + a.tie))


@pytest.mark.parametrize("gpus", [8, 16])
def test_the_answer_equals_trying_every_layout(gpus: int) -> None:
    a = allocator(gpus, groups=(1, 2, 4))
    best = a.solve()
    least, fewest = brute_force(a)
    assert best.step <= least * (1 + a.tie) * (1 + 1e-6)
    assert best.gpus == fewest


def test_the_answer_explains_itself_and_survives_json() -> None:
    best = allocator().solve()
    text = best.explain()
    for part in ("binds:", "step", "MFU", "fullest attention rank", "fullest expert rank", "cycle="):
        assert part in text
    data = json.loads(json.dumps(best.to_dict()))
    assert data["placement"]["attention"] == best.attention_sizes
    assert data["binding"] in best.times
    assert best.memory_a.total <= gpu_preset("h800").hbm_bytes and best.memory_f.total <= gpu_preset("h800").hbm_bytes
    placement = placement_of(best, num_layers=8, num_experts=32)
    assert placement.world_size == best.gpus


def test_the_attention_share_never_falls_as_sequences_grow() -> None:
    rows = allocator(32, even_sequences=False, micro_batches=(8,)).over_lengths([2048, 4096, 8192, 16384])
    shares = [r.best.pa * r.best.m / (r.best.pa * r.best.m + r.best.pf * r.best.n) for r in rows if r.best]
    assert len(shares) == 4
    assert shares == sorted(shares)
    assert rows[0].gain is None
    assert all(r.gain is None or r.gain >= 1 - 0.011 for r in rows)  # its own split is best, up to the tie


def test_free_nics_are_never_worse_than_fixed_ones() -> None:
    fixed, free = (allocator(32, nics=n, tie=1e-6).solve() for n in ("fixed", "free"))
    assert free.busy <= fixed.busy * (1 + 1e-6)
    assert free.replicas * (free.pa * free.nics_a + free.pf * free.nics_f) <= 32


def test_two_pools_keep_their_budgets() -> None:
    old = cluster_preset("a100x16")
    a = allocator(8, ffn_cluster=old).solve()
    assert a.replicas * a.pa * a.m <= 8 and a.replicas * a.pf * a.n <= 16
    assert a.peak == pytest.approx(a.replicas * (a.pa * a.m * 989e12 + a.pf * a.n * 312e12))


def test_a_shared_nic_stays_with_one_group() -> None:
    a = replace(allocator(), cluster=cluster_preset("frontierx32")).solve()
    assert a.m % 2 == 0 and a.n % 2 == 0
    assert a.nics_a == a.m / 2


def test_nothing_fits_names_the_smallest_cluster_that_would() -> None:
    w = Workload(seq_len=4096, micro_batch=4, global_batch=64)
    with pytest.raises(
        ConfigError, match=r"fits nowhere on 8 GPUs .*smallest cluster of this kind that would do.* has \d+ GPUs"
    ) as e:
        RooflineAllocator(cluster_preset("h800x8"), model_preset("qwen3-30b"), w, memory_modes=MEMORY_MODES).solve()
    gpus = int(str(e.value).split(" has ")[1].split()[0])
    RooflineAllocator(cluster_preset(f"h800x{gpus}"), model_preset("qwen3-30b"), w, memory_modes=MEMORY_MODES).solve()


def test_bad_inputs_are_refused() -> None:
    with pytest.raises(ConfigError, match="micro_batch=3 does not divide"):
        allocator(micro_batches=(3,)).solve()
    with pytest.raises(ConfigError, match="nics='free' on one node"):
        allocator(8, nics="free").solve()
    alone = replace(cluster_preset("h800x8"), nics_per_node=0)
    with pytest.raises(ConfigError, match="has no NIC"):
        allocator(8, cluster=alone, ffn_cluster=cluster_preset("h800x8")).solve()


def test_the_simulated_step_meets_its_bound_from_above_and_the_cycle_is_chosen_by_it() -> None:
    a = allocator(32, tie=1e-6, max_replicas=2)
    best = a.solve()
    s = simulate_allocation(a, best)
    assert s.bound == pytest.approx(best.busy, rel=0.05)  # the closed form and the simulator count the same work
    assert s.bound <= s.makespan <= 1.5 * best.step
    better = refine(a, best)
    assert better.simulated is not None and better.step <= s.makespan * (1 + 1e-9)
    assert "simulated" in better.explain()
    assert max(better.memory_a.total, better.memory_f.total) <= a.cluster.gpu.hbm_bytes


@pytest.mark.parametrize(("pa", "pf"), [(1, 1), (2, 2), (3, 3), (1, 2), (2, 1)])
@pytest.mark.parametrize("batches", [4, 12, 24])
def test_live_units_bound_what_the_schedule_holds(pa: int, pf: int, batches: int) -> None:
    layers = 6
    place = Placement(attention=[1] * pa, ffn=[1] * pf, num_layers=layers, num_experts=4)
    costs = allocator().costs
    costs = replace(costs, model=replace(SMALL, num_layers=layers))
    held = live_units(AFPipeSchedule(place, batches))
    for role, letter in (("attention", "A"), ("ffn", "F")):
        most = max(v for k, v in held.items() if k[0] == letter)
        bound = costs.live_units(role, pa, pf, batches)
        assert most <= bound, (role, held)
        assert bound <= 2 * most + 2 * (pa + pf)


@pytest.mark.parametrize(("p", "batches"), [(1, 1), (1, 2), (1, 4), (2, 2), (2, 4), (2, 8), (4, 8), (4, 16)])
def test_the_fill_factor_follows_the_simulator(p: int, batches: int) -> None:
    a = allocator(32, tie=1e-6)
    w = replace(a.workload, global_batch=8 * batches)
    costs = replace(a.costs, workload=w, cycle=4 * p)
    one = replace(a, workload=w, groups=(p,), max_replicas=1).solve()
    s = simulate_allocation(replace(a, workload=w), one)
    assert a.fill_factor(costs, 1, p) == pytest.approx(s.makespan / one.busy, rel=0.25)


def test_memory_parts_add_up() -> None:
    a: Allocation = allocator().solve()
    for part in (a.memory_a, a.memory_f):
        assert sum(v for _, v in part.rows()) == pytest.approx(part.total)
        assert part.total > part.state > 0
        assert part.notes


def test_a_file_of_its_own_hardware_is_enough(tmp_path: object) -> None:
    spec = cluster_preset("h800x16").to_dict()
    spec["gpu"] = "h200"
    spec["nic_bandwidth"] = "100 Gbit/s"
    slow = ClusterSpec.from_dict(spec)
    assert slow.gpu.name == "H200" and slow.nic_bandwidth == 12.5e9
    assert allocator(cluster=slow).solve().busy >= allocator(cluster=replace(slow, nic_bandwidth=50e9)).solve().busy


# ---- the residual that rides, cut micro-batches, two pools
SHARED = replace(SMALL, shared_dim=2048)


def test_a_riding_residual_moves_the_shared_experts_and_saves_the_residual_rows() -> None:
    w = Workload(seq_len=4096, micro_batch=8, global_batch=256)
    direct = replace(allocator(), model=SHARED, workload=w).costs
    ride = replace(direct, residual="ride")
    assert not ride.rides(1) and ride.rides(2)
    peak = direct.cluster.gpu.peak("bf16")
    flops = 6 * 2 * 3 * 1024 * 2048 / 2 * w.tokens  # three products of D x 2048, forward and backward, per token and layer
    gain = direct.attention_group_seconds(2, 4) - ride.attention_group_seconds(2, 4)
    assert gain == pytest.approx(4 * flops / 4 / (peak * direct.cluster.gpu.gemm(w.tokens / 4)))
    more = ride.expert_seconds(4, 2) - direct.expert_seconds(4, 2)
    assert more == pytest.approx(flops / 4 / (peak * direct.cluster.gpu.gemm(w.tokens / 4)))
    assert ride.expert_seconds(4, 1) == direct.expert_seconds(4, 1)
    rows = direct.wire_bytes(4, 2)[0] - ride.wire_bytes(4, 2)[0]
    assert rows == pytest.approx(2 * w.tokens * 1024 * 2)  # one row there, its gradient back
    state = {}
    for name, c in (("direct", direct), ("ride", ride)):
        a, f = c.attention_memory(pa=2, pf=2, m=4, n=4), c.expert_memory(pa=2, pf=2, n=4)
        state[name] = (a.state, f.state)
    shared = 3 * 1024 * 2048
    assert state["direct"][0] - state["ride"][0] == 16 * 4 * shared
    assert state["ride"][1] - state["direct"][1] == 16 * 4 * (shared + 1024)


def test_the_better_residual_is_chosen_and_said() -> None:
    w = Workload(seq_len=1024, micro_batch=8, global_batch=128)
    slow = replace(cluster_preset("h800x16"), nic_bandwidth=5e9)
    steps = {
        r: replace(allocator(), model=SMALL, workload=w, cluster=slow, groups=(2,), residual=r).solve()
        for r in ("direct", "ride", "auto")
    }
    assert steps["ride"].busy < steps["direct"].busy  # the network binds
    assert (steps["auto"].residual, steps["auto"].busy) == ("ride", steps["ride"].busy)
    assert "residual=ride" in steps["auto"].explain()
    sim = {r: simulate_allocation(replace(allocator(), workload=w, cluster=slow), a) for r, a in steps.items()}
    assert sim["ride"].bound < sim["direct"].bound
    again = refine(replace(allocator(), workload=w, cluster=slow, residual="auto"), steps["direct"], parts=(1,))
    assert again.residual == "ride"


def test_a_micro_batch_is_cut_where_the_simulation_gains() -> None:
    w = Workload(seq_len=4096, micro_batch=16, global_batch=64)
    a = replace(allocator(), workload=w, groups=(1,), max_replicas=1)
    whole = a.solve()
    cut, kept = refine(a, whole), refine(a, whole, parts=(1,))
    assert cut.workload.micro_batch == 8 and cut.micro_batches == 2 * whole.micro_batches
    assert cut.step < kept.step and cut.memory_a.activations < kept.memory_a.activations
    assert refine(replace(a, workload=replace(w, micro_batch=1, global_batch=4)), replace(whole, m=1), parts=(1,)).cycle


def test_two_pools_have_their_own_links() -> None:
    old = replace(cluster_preset("a100x8"), nic_latency=40e-6)
    new = replace(cluster_preset("h200x8"), nic_latency=10e-6)
    a = replace(allocator(), cluster=new, ffn_cluster=old, groups=(1,), max_replicas=1)
    best = a.solve()
    links = links_of(a, best)
    assert links.bandwidth * links.nics["A0"] == pytest.approx(best.nics_a * 50e9 * 0.85)
    assert links.bandwidth * links.nics["F0"] == pytest.approx(best.nics_f * 25e9 * 0.85)
    assert links.between("A0", "F0") == pytest.approx(25e-6) and links.between("A0", "A0") == 10e-6
    s = simulate_allocation(a, best)
    assert s.bound == pytest.approx(best.busy, rel=0.05)
    slower = simulate_allocation(replace(a, ffn_cluster=replace(old, nic_latency=1e-2)), best)
    assert slower.makespan > s.makespan


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"goal": "fast"}, "goal='fast' is unknown"),
        ({"nics": "all"}, "nics='all'"),
        ({"residual": "local"}, "residual='local'"),
        ({"groups": (0,)}, "an entry of groups=0"),
        ({"micro_batches": (0,)}, "an entry of micro_batches=0"),
        ({"memory_modes": ("full",)}, "memory_modes has 'full'"),
        ({"max_replicas": 0}, "max_replicas=0"),
        ({"tie": -1}, "tie=-1"),
    ],
)
def test_options_that_cannot_be_tried_are_refused_at_once(options: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        allocator(**options)
