"""AF-Pipe orders: complete, in causal order, bounded as promised, and refused where the promise cannot hold."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchmoe.errors import ConfigError
from torchmoe.pipeline.action import Op, Schedule
from torchmoe.pipeline.costs import Costs
from torchmoe.pipeline.lower import lower
from torchmoe.pipeline.network import Links
from torchmoe.pipeline.schedules.afpipe import AFPipeSchedule, cycles, live_units
from torchmoe.pipeline.simulate import simulate
from torchmoe.pipeline.verify import verify
from torchmoe.placement import Placement


def place(p_attention: int, p_ffn: int, num_layers: int) -> Placement:
    return Placement(attention=[1] * p_attention, ffn=[1] * p_ffn, num_layers=num_layers, num_experts=4)


@st.composite
def layouts(draw):
    num_layers = draw(st.integers(1, 9))
    pa, pf = draw(st.integers(1, min(4, num_layers))), draw(st.integers(1, min(4, num_layers)))
    return place(pa, pf, num_layers), draw(st.integers(1, 33)), draw(st.integers(2 * max(pa, pf), 6 * max(pa, pf)))


def run_in_causal_order(schedule: Schedule, num_layers: int) -> int:
    """Execute the lists with infinitely fast messages; the number of actions that ran."""
    done: set[tuple[str, int, int]] = set()
    at = dict.fromkeys(schedule.lists, 0)
    moved = True
    while moved:
        moved = False
        for name, actions in schedule.lists.items():
            while at[name] < len(actions):
                a = actions[at[name]]
                s, m = a.stage, a.microbatch
                if a.op is Op.FORWARD:
                    need = [("F", s - 1, m)] if s else []
                elif a.op is Op.BACKWARD_WEIGHT:
                    need = [("B", s, m)]
                else:
                    need = [("F", s, m)] + ([("B", s + 1, m)] if s < 2 * num_layers else [])
                if any(n not in done for n in need):
                    break
                done.add(({"I": "B"}.get(a.op.value, a.op.value), s, m))
                at[name] += 1
                moved = True
    return sum(at.values())


@given(layouts())
@settings(max_examples=50, deadline=None)
def test_every_unit_runs_once_each_way_on_its_group_and_in_causal_order(case):
    placement, n, cycle = case
    schedule = AFPipeSchedule(placement, n, cycle=cycle)
    head = 2 * placement.num_layers
    for group in placement.groups():
        acts = schedule.lists[str(group)]
        want = {(s, op, m) for s in placement.stages(group) for op in (Op.FORWARD, Op.BACKWARD) for m in range(n)}
        assert len(acts) == len(want) and {a[:3] for a in acts} == want
        for a, b in itertools.pairwise(acts):
            assert not (a.stage == head and a.op is Op.FORWARD) or b[:3] == (head, Op.BACKWARD, a.microbatch)
    assert run_in_causal_order(schedule, placement.num_layers) == sum(map(len, schedule.lists.values()))


@pytest.mark.parametrize(("p", "v"), [(1, 4), (2, 4), (3, 2)])
@pytest.mark.parametrize("factor", [2, 3, 4])
def test_live_units_stay_within_the_closed_form_of_every_group_and_reach_it_somewhere(p, v, factor):
    """2(2p-r-1) + (v-1)G + 1 on group r of the chain, where v counts the head (papers.md 1.6)."""
    placement = place(p, p, p * v)
    cycle = factor * p
    peaks = live_units(AFPipeSchedule(placement, 4 * cycle, cycle=cycle))
    padded = -(-(2 * p * v + 1) // (2 * p))
    slack = []
    for group in placement.groups():
        r = 2 * group.index + (group.role == "ffn")
        slack.append(2 * (2 * p - r - 1) + (padded - 1) * cycle + 1 - peaks[str(group)])
    assert min(slack) >= 0 and min(slack) <= 2 * p + 1


@given(layouts(), st.integers(0, 4))
@settings(max_examples=35, deadline=None)
def test_every_layout_is_proved_free_of_deadlock(case, held):
    """One and several groups of either role, cycles from 2p to 6p, whole and split backwards, all forms of the residual."""
    placement, n, cycle = case
    schedule = AFPipeSchedule(placement, n, cycle=cycle, weights_held=held)
    for residual in ("local",) if len(placement.attention) == 1 else ("direct", "ride"):
        for look_ahead in (0, 1, 50):
            verify(lower(schedule, placement, residual=residual, look_ahead=look_ahead), placement, residual=residual)


def test_transfers_as_long_as_a_forward_are_hidden_by_a_cycle_of_4p():
    """papers.md 1.6: .962 of the time is computation at p = 2, v = 4, G = 4p with T_c = 1; without the head's extra hop."""
    placement, head = place(2, 2, 7), 14
    costs = Costs(**{k: lambda s: float(s < head) for k in ("forward", "input_grad", "weight_grad")})
    free = {}
    for cycle in (4, 8):
        for latency in (0.0, 1.0):
            links = Links(latency=latency, host_latency=0.0)
            run = simulate(AFPipeSchedule(placement, 32, cycle=cycle), costs, placement, links=links, issue="ahead")
            free[cycle, latency] = max(run.busy.values()) / run.makespan
    assert free[4, 0.0] > 0.97 and free[8, 0.0] > 0.97
    assert free[8, 1.0] > 0.96 > free[4, 1.0]


@given(layouts(), st.integers(0, 40))
@settings(max_examples=35, deadline=None)
def test_live_units_never_exceed_the_bound_that_was_asked_for(case, extra):
    placement, n, cycle = case
    longest = max(cycles(n, cycle))
    one_role = len(placement.attention) == len(placement.ffn)
    needs = [
        (len(placement.stages(g)) - 1) * longest + 1 if one_role else len(placement.stages(g)) * longest
        for g in placement.groups()
    ]
    bound = max(needs) + extra
    schedule = AFPipeSchedule(placement, n, cycle=cycle, max_live=bound)
    assert max(live_units(schedule).values()) <= bound
    assert run_in_causal_order(schedule, placement.num_layers) == sum(map(len, schedule.lists.values()))


@given(layouts(), st.integers(1, 6))
@settings(max_examples=40, deadline=None)
def test_delayed_weight_gradients_stay_behind_their_input_gradient_and_only_experts_have_them(case, delay):
    placement, n, cycle = case
    schedule = AFPipeSchedule(placement, n, cycle=cycle, weights_held=delay)
    for acts in schedule.lists.values():
        seen_input = []
        for a in acts:
            if a.op is Op.BACKWARD_INPUT:
                assert a.stage % 2
                seen_input.append((a.stage, a.microbatch))
            if a.op is Op.BACKWARD_WEIGHT:
                assert (a.stage, a.microbatch) in seen_input
                seen_input.remove((a.stage, a.microbatch))
            assert len(seen_input) <= delay
        assert not seen_input
    assert run_in_causal_order(schedule, placement.num_layers) == sum(map(len, schedule.lists.values()))


def test_an_order_chosen_for_the_real_times_is_faster_than_one_for_equal_units():
    """Attention 1.5 times as long as the experts, transfers longer than both: the calibration at 4K, cut in two."""
    placement, head = Placement(attention=[4], ffn=[4], num_layers=8, num_experts=4), 16

    def seconds(s: int) -> float:
        return 0.0 if s == head else 8.0 if s % 2 else 11.8

    c = Costs(
        **dict.fromkeys(("forward", "input_grad", "weight_grad"), seconds),
        message=dict.fromkeys(("dispatch", "combine", "d_combine", "d_dispatch"), 4 * 16.4),
    )
    paces = ({}, {"seconds": (11.8, 8.0), "transfer": 16.4})
    orders = [AFPipeSchedule(placement, 16, cycle=3, weights_held=4, **pace) for pace in paces]
    ends = [simulate(s, c, placement, links=Links(bandwidth=1.0), issue="ahead").makespan for s in orders]
    assert ends[1] < 0.99 * ends[0], ends


def test_cycles_are_equal_up_to_one_and_none_is_short():
    for n in range(1, 60):
        for g in range(2, 20):
            c = cycles(n, g)
            assert sum(c) == n and max(c) - min(c) <= 1 and (min(c) >= g or len(c) == 1)


def test_forward_only_has_every_forward_and_nothing_else():
    schedule = AFPipeSchedule(place(2, 2, 3), 5, forward_only=True)
    assert schedule.forward_only and {a.op for acts in schedule.lists.values() for a in acts} == {Op.FORWARD}
    assert run_in_causal_order(schedule, 3) == 7 * 5


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"cycle": 3}, "cycle=3.*2p = 4.*use 4 or more"),
        ({"cycle": 4.5}, "cycle=4.5 must be a whole number"),
        ({"max_live": 3}, "max_live=3.*needs"),
        ({"weights_held": -1}, "weights_held=-1"),
        ({"transfer": -1.0}, "transfer=-1.0"),
        ({"seconds": (1.0, math.inf)}, r"seconds\[1\]=inf"),
    ],
)
def test_bad_parameters_are_refused_with_value_rule_and_remedy(kwargs, text):
    with pytest.raises(ConfigError, match=text):
        AFPipeSchedule(place(2, 2, 4), 8, **kwargs)


def test_no_micro_batch_is_refused():
    with pytest.raises(ConfigError, match="num_microbatches=0"):
        AFPipeSchedule(place(1, 1, 1), 0)
