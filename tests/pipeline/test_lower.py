"""Lowering: the exact text that the runner executes, and nothing posted before its size is known."""

import itertools

import pytest

from torchmoe.errors import ConfigError, ScheduleError
from torchmoe.pipeline.action import Action, Op, Schedule
from torchmoe.pipeline.lower import KINDS, lower, message_layer
from torchmoe.pipeline.schedules.afpipe import AFPipeSchedule
from torchmoe.pipeline.verify import verify
from torchmoe.placement import Placement


def place(p: int, num_layers: int, p_ffn: int | None = None) -> Placement:
    return Placement(attention=[1] * p, ffn=[1] * (p_ffn or p), num_layers=num_layers, num_experts=4)


def test_one_layer_one_microbatch_without_look_ahead_is_exactly_this():
    placement = place(1, 1)
    lists = lower(AFPipeSchedule(placement, 1), placement, look_ahead=0).dump().splitlines()
    assert lists == [
        "A0=,0F0,0SEND_F0:counts,0SEND_F0:dispatch,2RECV_F0:combine,2WAIT_F0:combine,2F0,2B0,2SEND_B0:d_combine,"
        "0RECV_B0:d_dispatch,0WAIT_B0:d_dispatch,0B0",
        "F0=,1RECV_F0:counts,1WAIT_F0:counts,1RECV_F0:dispatch,1WAIT_F0:dispatch,1F0,1SEND_F0:combine,"
        "1RECV_B0:d_combine,1WAIT_B0:d_combine,1I0,1SEND_B0:d_dispatch,1W0",
    ]


def test_two_attention_groups_send_ids_and_the_residual_directly():
    placement = place(2, 2)
    rows = lower(AFPipeSchedule(placement, 1), placement, look_ahead=0).dump().splitlines()
    assert rows[1] == (
        "A1=,2RECV_F0:ids,2WAIT_F0:ids,2RECV_F0:combine,2RECV_F0:residual,2WAIT_F0:combine,2WAIT_F0:residual,2F0,"
        "2SEND_F0:counts,2SEND_F0:ids,2SEND_F0:dispatch,2SEND_F0:residual,"
        "2RECV_B0:d_dispatch,2RECV_B0:d_residual,2WAIT_B0:d_dispatch,2WAIT_B0:d_residual,2B0,2SEND_B0:d_combine,2SEND_B0:d_residual"
    )
    ride = lower(AFPipeSchedule(placement, 1), placement, residual="ride", look_ahead=0).dump()
    assert "residual" not in ride and "ids" in ride


@pytest.mark.parametrize("look_ahead", [0, 1, 3, 99])
@pytest.mark.parametrize(("pa", "pf", "layers"), [(1, 1, 3), (2, 2, 5), (1, 2, 4), (3, 2, 6)])
def test_receives_are_posted_once_before_their_wait_and_never_before_their_size_is_known(pa, pf, layers, look_ahead):
    placement = place(pa, layers, pf)
    schedule = lower(AFPipeSchedule(placement, 9), placement, look_ahead=look_ahead)
    sent, received = set(), set()
    for acts in schedule.lists.values():
        index = {a: i for i, a in enumerate(acts)}
        assert len(index) == len(acts)
        for a, i in index.items():
            m = a.microbatch
            if a.op in (Op.SEND_F, Op.SEND_B):
                compute = Op.FORWARD if a.op is Op.SEND_F else Op.BACKWARD_INPUT if a.stage % 2 else Op.BACKWARD
                assert index[Action(a.stage, compute, m)] < i
                sent.add((a.edge, message_layer(a), m))
            if a.op in (Op.RECV_F, Op.RECV_B):
                received.add((a.edge, message_layer(a), m))
                wait = Op.WAIT_F if a.op is Op.RECV_F else Op.WAIT_B
                assert i < index[Action(a.stage, wait, m, a.edge)]
                if a.op is Op.RECV_B:
                    assert index[Action(a.stage, Op.FORWARD, m)] < i
                elif a.edge == "combine":
                    known = Action(a.stage - 2, Op.FORWARD, m) if pa == 1 else Action(a.stage, Op.WAIT_F, m, "ids")
                    assert index[known] < i
                elif a.edge == "dispatch":
                    assert index[Action(a.stage, Op.WAIT_F, m, "counts")] < i
    assert sent == received
    many = pa > 1
    kinds = [k for k in KINDS if k != "labels" and (many or k not in ("ids", "residual", "d_residual"))]
    assert sent == {(k, layer, m) for k in kinds for layer in range(layers) for m in range(9)}


@pytest.mark.parametrize("look_ahead", [0, 1, 3])
def test_fixed_sizes_need_no_counts_and_post_dispatches_ahead(look_ahead):
    placement = place(1, 3)
    schedule = lower(AFPipeSchedule(placement, 6), placement, look_ahead=look_ahead, fixed_sizes=True)
    verify(schedule, placement)
    acts = schedule.lists["F0"]
    assert not any(a.edge == "counts" for lists in schedule.lists.values() for a in lists)
    order = [a for a in acts if a.op is Op.FORWARD]
    index = {a: i for i, a in enumerate(acts)}
    for before, unit in itertools.pairwise(order):
        posted = index[Action(unit.stage, Op.RECV_F, unit.microbatch, "dispatch")]
        assert (posted < index[before]) == (look_ahead > 0)


@pytest.mark.parametrize("p", [1, 2])
def test_a_head_on_the_last_f_group_gets_the_labels_and_is_proved_too(p):
    placement = Placement(attention=[2] * p, ffn=[2] * p, num_layers=3, num_experts=4, head="ffn")
    schedule = lower(AFPipeSchedule(placement, 5), placement)
    verify(schedule, placement)
    owner = str(placement.stage_group(6))
    assert owner[0] == "F" and any(a.edge == "labels" for a in schedule.lists[owner])


def test_forward_only_sends_forward_messages_alone():
    placement = place(2, 3)
    schedule = lower(AFPipeSchedule(placement, 4, forward_only=True), placement)
    assert schedule.forward_only and schedule.lowered
    assert not any("B" in str(a.op) for acts in schedule.lists.values() for a in acts)


def test_text_of_a_lowered_schedule_comes_back():
    placement = place(2, 3)
    schedule = lower(AFPipeSchedule(placement, 4), placement)
    assert Schedule.load(schedule.dump()) == schedule


def test_wrong_units_messages_and_parameters_are_refused():
    placement = place(1, 1)
    good = AFPipeSchedule(placement, 1)
    with pytest.raises(ScheduleError, match="messages already"):
        lower(lower(good, placement), placement)
    with pytest.raises(ScheduleError, match="unit 1 is on F0"):
        lower(Schedule.load("A0=,1F0\n"), placement)
    with pytest.raises(ScheduleError, match="past the head"):
        lower(Schedule.load("A0=,4F0\n"), placement)
    with pytest.raises(ConfigError, match="look_ahead=-1"):
        lower(good, placement, look_ahead=-1)
    with pytest.raises(ConfigError, match="residual"):
        lower(good, placement, residual="direct")
    for text in ("1SEND_F0:dispatch", "0SEND_B0:dispatch", "0RECV_F0:combine", "0F0"):
        with pytest.raises(ScheduleError):
            message_layer(Action.parse(text))
