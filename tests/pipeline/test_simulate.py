"""simulate(): the published formulas exactly, links against closed forms, memory, both bubble definitions, refusals."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pipeline.test_verify import torch_table
from torchmoe.errors import ConfigError, ScheduleError
from torchmoe.pipeline.action import Op, Schedule
from torchmoe.pipeline.costs import Costs
from torchmoe.pipeline.network import Host, Links, fair_rates
from torchmoe.pipeline.schedules.afpipe import AFPipeSchedule
from torchmoe.pipeline.schedules.colocated import ColocatedWiring, colocated
from torchmoe.pipeline.schedules.pipeline import gpipe, interleaved_1f1b, one_f_one_b
from torchmoe.pipeline.schedules.zero_bubble import dualpipev, zb_h1
from torchmoe.pipeline.simulate import simulate
from torchmoe.pipeline.verify import verify
from torchmoe.placement import Placement

TIMES = [(1.0, 1.0, 1.0), (1.0, 1.25, 0.75), (2.0, 2.5, 1.5)]


def costs(f: float, i: float, w: float, v: int = 1, **more) -> Costs:
    return Costs(forward=f / v, input_grad=i / v, weight_grad=w / v, **more)


# ---- bubbles (distributed.md 2.2); F, I, W are one rank's whole share, B = I + W
@pytest.mark.parametrize(("f", "i", "w"), TIMES)
@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 4), (4, 8), (8, 16)])
def test_bubbles_are_the_published_formulas(p, m, f, i, w):
    b = i + w
    assert simulate(gpipe(p, m), costs(f, i, w)).bubble_makespan == pytest.approx((p - 1) * (f + b))
    plain = simulate(one_f_one_b(p, m), costs(f, i, w))
    assert plain.bubble_makespan == pytest.approx((p - 1) * (f + b))
    assert plain.exposed == pytest.approx((p - 1) / (m + p - 1))
    for v in (2, 3):
        run = simulate(interleaved_1f1b(p, m, num_chunks=v), costs(f, i, w, v))
        assert run.bubble_makespan == pytest.approx((p - 1) * (f + b) / v)
    assert simulate(zb_h1(p, m), costs(f, i, w)).bubble_makespan == pytest.approx((p - 1) * (f + b - 2 * w))


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (8, 16)])
@pytest.mark.parametrize("pair", [1.0, 0.9])
def test_dualpipev_has_its_bubble_with_overlapped_pairs(p, m, pair):
    """(PP/2 - 1)(F&B + B - 3W) with PP = 2p stages and stage times."""
    f = i = w = 0.5
    run = simulate(dualpipev(p, m), Costs(forward=f, input_grad=i, weight_grad=w, overlap=pair))
    pairs = [a for a in dualpipev(p, m).lists["0"] if a.sub]
    work = 2 * m * (f + i + w) - len(pairs) * (1 - pair) * (f + i + w)
    assert run.busy["0"] == pytest.approx(work)
    if pair == 1.0:
        assert run.bubble_makespan == pytest.approx((p - 1) * (pair * (f + i + w) + (i + w) - 3 * w))


@pytest.mark.parametrize(
    ("name", "makespan", "span"),
    [("LoopedBFS", 4.5, 4.5), ("InterleavedZeroBubble", 1.5, 1.5), ("ZBVZeroBubble", 1.5, 0.0), ("Interleaved1F1B", 4.5, 4.5)],
)
def test_tables_of_torch_have_the_published_bubbles_by_both_definitions(name, makespan, span):
    run = simulate(Schedule.load(torch_table(name, 4, 8, 2)), costs(1, 1, 1, 2))
    assert run.bubble_makespan == pytest.approx(makespan)
    assert run.bubble_span == pytest.approx(span)


@pytest.mark.parametrize("p", [2, 3, 4])
def test_warm_up_bubbles_are_those_of_the_paper(p):
    """B_base = (PP-1)/v [L (T_a + T_f + 2 T_a2a) + T_p2p]; B_AF = (P-1) (max(T_a, T_f) + T_M2N) per hop of the chain of P = 2p
    groups, which is the paper's (PP-1)/(2v)[...] in its stage times (papers.md 1.6)."""
    ta, tf, t_a2a, layers, v = 3.0, 2.0, 0.7, 2, 2
    t_p2p = t_a2a  # pure latency: on shared NICs the first hand-over would meet the second micro-batch's all-to-all
    wiring = ColocatedWiring(num_layers=layers * v * p, ep_size=2, num_groups=p, num_chunks=v)
    schedule = colocated(wiring, 4 * p)
    run = simulate(schedule, Costs(forward=lambda s: tf if s % 2 else ta), wiring, links=Links(latency=t_a2a))
    assert run.first[str(p - 1)] == pytest.approx((p - 1) * (layers * (ta + tf + 2 * t_a2a) + t_p2p))
    t, t_m2n = 2.0, 0.5
    placement = Placement(attention=[1] * p, ffn=[1] * p, num_layers=p * v, num_experts=4)
    links = Links(latency=t_m2n, host_latency=0.0)
    run = simulate(AFPipeSchedule(placement, 8 * p), Costs(forward=t), placement, links=links)
    assert run.first[f"F{p - 1}"] == pytest.approx((2 * p - 1) * (t + t_m2n))


# ---- links
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=10), st.data())
@settings(max_examples=100, deadline=None)
def test_shared_rates_are_max_min_fair(pairs, data):
    """Feasible, and every flow has a full NIC on which no other flow is faster (the definition)."""
    caps = st.lists(st.floats(0.5, 8), min_size=5, max_size=5)
    egress, ingress = data.draw(caps), data.draw(caps)
    flows = {p: pairs.count(p) for p in pairs}
    rates = fair_rates(flows, egress, ingress)
    sides = [(0, i, egress[i]) for i in range(5)] + [(1, i, ingress[i]) for i in range(5)]
    used = {(k, i): sum(rates[p] * n for p, n in flows.items() if p[k] == i) for k, i, _ in sides}
    assert all(used[k, i] <= cap * (1 + 1e-9) for k, i, cap in sides)
    for p in flows:
        full = [(k, i) for k, i, cap in sides if p[k] == i and used[k, i] > cap * (1 - 1e-9)]
        assert any(all(rates[q] <= rates[p] * (1 + 1e-9) for q in flows if q[k] == i) for k, i in full)


def test_one_transfer_takes_bytes_over_bandwidth_plus_latency_and_waits_for_its_receive():
    schedule = Schedule.load("0F0,0SEND_F0:act\n1RECV_F0:act,1WAIT_F0:act,1F0\n")
    c = Costs(forward=1.0, message={"act": 30.0})
    run = simulate(schedule, c, links=Links(bandwidth=10.0, latency=0.5))
    assert run.makespan == pytest.approx(1 + 3 + 0.5 + 1)
    assert run.blocked["1"] == pytest.approx(4.5) and run.carried["0"][0] == pytest.approx(3.0)
    run = simulate(schedule, c, links=Links(bandwidth=10.0, handshake=2.0))
    assert run.makespan == pytest.approx(max(1, 2) + 3 + 1)
    late = Schedule.load("0F0,0SEND_F0:act,0F1,0SEND_F1:act\n1RECV_F0:act,1WAIT_F0:act,1F0,1RECV_F1:act,1WAIT_F1:act,1F1\n")
    assert simulate(late, c, links=Links(bandwidth=10.0)).makespan == pytest.approx(1 + 3 + 1 + 3 + 1)


def test_issuing_ahead_posts_the_next_receive_while_the_device_computes():
    late = Schedule.load("0F0,0SEND_F0:act,0F1,0SEND_F1:act\n1RECV_F0:act,1WAIT_F0:act,1F0,1RECV_F1:act,1WAIT_F1:act,1F1\n")
    c = Costs(forward=1.0, message={"act": 5.0})
    inline = simulate(late, c, links=Links(bandwidth=10.0))
    ahead = simulate(late, c, links=Links(bandwidth=10.0), issue="ahead")
    assert inline.makespan == pytest.approx(1 + 0.5 + 1 + 0.5 + 1) and ahead.makespan == pytest.approx(1 + 0.5 + 1 + 1)


def test_two_streams_share_the_device_by_the_contention_factor():
    """Free overlap hides the shorter direction, a factor of 2 gives nothing over one stream."""
    placement = Placement(attention=[1], ffn=[1], num_layers=2, num_experts=2)
    schedule = AFPipeSchedule(placement, 16)
    one = simulate(schedule, Costs(), placement, issue="ahead")
    free = simulate(schedule, Costs(), placement, issue="ahead", contention=1.0)
    none = simulate(schedule, Costs(), placement, issue="ahead", contention=2.0)
    assert free.makespan < 0.8 * one.makespan and none.makespan >= none.busy["A0"] * (1 - 1e-9)
    assert none.makespan == pytest.approx(one.makespan, rel=0.05)
    lanes = {e.stream for e in free.events if e.kind == "compute"}
    assert lanes == {"compute", "backward"}


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.integers(1, 6))
@settings(max_examples=25, deadline=None)
def test_per_rank_and_per_group_agree_when_all_ranks_do_the_same(m, n, p, micro):
    placement = Placement(attention=[m] * p, ffn=[n] * p, num_layers=2, num_experts=6)
    c = Costs(message=dict.fromkeys(("dispatch", "combine", "d_combine", "d_dispatch"), 3.0))
    group, rank = (
        simulate(AFPipeSchedule(placement, micro), c, placement, links=Links(bandwidth=1.0), per_rank=r) for r in (False, True)
    )
    assert group.makespan == pytest.approx(rank.makespan, rel=1e-6)
    assert group.busy["A0"] == pytest.approx(rank.busy["A0[0]"])


def test_a_slow_rank_delays_everybody_and_needs_the_per_rank_form():
    placement = Placement(attention=[2], ffn=[2], num_layers=2, num_experts=4)
    even = simulate(AFPipeSchedule(placement, 8), Costs(), placement, per_rank=True)
    c = Costs(ranks={"F0": (1.5, 0.5)})
    uneven = simulate(AFPipeSchedule(placement, 8), c, placement, per_rank=True)
    assert uneven.makespan > 1.05 * even.makespan and uneven.busy["F0[0]"] == pytest.approx(3 * uneven.busy["F0[1]"])
    with pytest.raises(ConfigError, match="per_rank=True"):
        simulate(AFPipeSchedule(placement, 8), c, placement)


# ---- bounds and memory
@given(st.integers(1, 3), st.integers(1, 5), st.integers(1, 9), st.sampled_from([0.0, 0.3, 2.0]))
@settings(max_examples=30, deadline=None)
def test_no_step_is_shorter_than_its_bound_and_every_event_is_inside_it(p, layers, micro, size):
    placement = Placement(attention=[1] * min(p, layers), ffn=[1] * min(p, layers), num_layers=layers, num_experts=4)
    c = Costs(message=dict.fromkeys(("dispatch", "combine", "d_combine", "d_dispatch"), size))
    run = simulate(AFPipeSchedule(placement, micro), c, placement, links=Links(bandwidth=1.0))
    assert run.makespan >= run.bound * (1 - 1e-9)
    compute = [e for e in run.events if e.kind == "compute"]
    assert max(e.end for e in compute) == pytest.approx(run.makespan)
    for group in placement.groups():
        mine = sorted((e.start, e.end) for e in compute if e.group == str(group))
        assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(mine)), "one thing at a time"


def test_peak_memory_is_live_units_times_bytes_and_buffers_are_counted():
    run = simulate(one_f_one_b(4, 8), Costs(activation=10.0))
    assert run.peak_memory == {"0": 40.0, "1": 30.0, "2": 20.0, "3": 10.0}
    with_buffers = simulate(
        one_f_one_b(4, 8), Costs(activation=10.0, message={"act": 2.0, "grad": 2.0}), links=Links(bandwidth=1.0)
    )
    assert all(with_buffers.peak_memory[k] > v for k, v in run.peak_memory.items())
    held = simulate(zb_h1(4, 8), Costs(activation=10.0, held=1.0))
    assert held.peak_memory["3"] == pytest.approx(10 * 4 + 4)


def test_more_live_units_than_memory_allows_are_refused_with_the_remedy():
    with pytest.raises(ConfigError, match="0 holds 40 bytes of live units, a rank has 39; use a shorter cycle"):
        simulate(one_f_one_b(4, 8), Costs(activation=10.0), memory_limit=39)


def test_micro_batches_of_different_lengths_cost_their_own_time():
    run = simulate(gpipe(1, 3), Costs(microbatch=(1.0, 2.0, 0.5)))
    assert run.makespan == pytest.approx(3 * 3.5)
    with pytest.raises(ConfigError, match="microbatch has 2 factors"):
        simulate(gpipe(1, 3), Costs(microbatch=(1.0, 2.0)))


def test_weight_gradients_fill_bubbles_without_more_work():
    placement = Placement(attention=[1, 1], ffn=[1, 1], num_layers=4, num_experts=4)
    whole, split = AFPipeSchedule(placement, 12, transfer=0.0), AFPipeSchedule(placement, 12, transfer=0.0, weights_held=4)
    c = Costs(forward=lambda s: float(s < 8), input_grad=lambda s: float(s < 8), weight_grad=lambda s: float(s < 8))
    a, b = simulate(whole, c, placement, issue="ahead"), simulate(split, c, placement, issue="ahead")
    assert a.busy == pytest.approx(b.busy) and b.makespan <= a.makespan
    assert verify(split, placement).peak_held["F0"] <= 4


def test_a_shaped_links_bucket_passes_at_once_what_a_pause_has_saved():
    """Bucket 4, rate 10, messages of 10: 0.6 s from full, then 0.2 s of pause save 2, so 0.8 s."""
    run = simulate(
        Schedule.load("0F0,0F1\n1F0,1F1\n"), Costs(forward=0.8, message={"act": 10.0}), links=Links(bandwidth=10, burst=4)
    )
    assert [e.end for e in run.events if e.kind == "recv"] == pytest.approx([0.8 + 0.6, 1.6 + 0.8])
    assert run.makespan == pytest.approx(2.4 + 0.8)


# ---- refusals
@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_costs_and_links_that_make_no_sense_are_refused_before_anything_runs(bad):
    for name in ("forward", "input_grad", "weight_grad", "activation", "held", "overlap"):
        with pytest.raises(ConfigError, match=f"{name}={bad}"):
            Costs(**{name: bad})
    with pytest.raises(ConfigError, match=r"forward\[3\]"):
        Costs(forward={3: bad})
    with pytest.raises(ConfigError, match=r"message\['dispatch'\]"):
        Costs(message={"dispatch": bad})
    with pytest.raises(ConfigError, match=r"forward\(0\)"):
        simulate(gpipe(1, 1), Costs(forward=lambda s: bad))
    for name in ("latency", "handshake", "send_overhead", "burst"):
        with pytest.raises(ConfigError, match=name):
            Links(**{name: bad})
    if bad != math.inf:
        with pytest.raises(ConfigError, match="bandwidth"):
            Links(bandwidth=bad)


def test_a_deadlock_ends_the_simulation_with_its_name():
    bad = Schedule.load("0RECV_B0:grad,0F0,0SEND_F0:act,0WAIT_B0:grad,0B0\n1RECV_F0:act,1WAIT_F0:act,1F0,1B0\n")
    with pytest.raises(ScheduleError, match="deadlock: 0 never gets past 0WAIT_B0:grad"):
        simulate(bad, Costs())
    with pytest.raises(ConfigError, match="contention"):
        simulate(gpipe(1, 1), Costs(), issue="ahead", contention=3.0)
    with pytest.raises(ConfigError, match="forward has no value for stage 1"):
        simulate(gpipe(2, 1), Costs(forward={0: 1.0}))


def test_forward_only_schedules_simulate_too():
    placement = Placement(attention=[1, 1], ffn=[1, 1], num_layers=3, num_experts=4)
    run = simulate(AFPipeSchedule(placement, 4, forward_only=True), Costs(), placement)
    assert {e.action[1] for e in run.events if e.kind == "compute"} == {Op.FORWARD.value}


def test_messages_queue_for_the_cores_that_all_ranks_share():
    """Each of the two messages has two ends, of 2 s."""
    first = "0RECV_B0:grad,0F0,0SEND_F0:act,0WAIT_B0:grad,0B0\n"
    schedule = Schedule.load(first + "1RECV_F0:act,1WAIT_F0:act,1F0,1B0,1SEND_B0:grad\n")
    costs = Costs(message={"act": 10.0, "grad": 10.0})
    plain = simulate(schedule, costs, issue="ahead")
    assert plain.makespan == 1 + 1 + 2 + 2
    busy = simulate(schedule, costs, issue="ahead", host=Host(message=2.0, cores=1))
    assert busy.makespan == pytest.approx(6 + 4 * 2)  # four ends of 2 s, none hidden
    assert simulate(schedule, costs, issue="ahead", host=Host(message=2.0, cores=2)).makespan == pytest.approx(6 + 4)
    issued = simulate(schedule, costs, issue="ahead", host=Host(message=0.0, unit=0.5, cores=1))
    assert issued.makespan == pytest.approx(6 + 3 * 0.5)  # 1B0 is issued while 1F0 computes
    with pytest.raises(ConfigError, match="cores=0"):
        Host(message=0.0, cores=0)
    with pytest.raises(ConfigError, match="message=-1"):
        Host(message=-1.0, cores=1)
