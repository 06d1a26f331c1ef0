"""The emulated cluster's model: the published calibration, equal work and bytes in every scheme, and honest verdicts."""

import os

import pytest

from benchmarks import emulated_cluster, emulated_cluster_net
from benchmarks.emulated_cluster_model import LAYERS, ROUNDS, WORLD, Calibration, schemes, work_of
from torchmoe.errors import ScheduleError
from torchmoe.pipeline.action import Action
from torchmoe.pipeline.network import Links
from torchmoe.pipeline.verify import verify

RATE = 12.5e6


def test_the_calibration_is_the_published_shares_of_figure_6a():
    """28.38, 19.22 and twice 26.3 percent at 4K (distributed.md 2.4)."""
    a, f, c = Calibration(4, "step").shares
    assert (a, f, c) == pytest.approx((28.38, 19.22, 26.3), abs=0.15)
    for length in (4, 8, 16, 32):
        step, fwd = Calibration(length, "step"), Calibration(length, "fwd")
        assert 3 * (fwd.attention + fwd.experts) / (3 * (step.attention + step.experts)) == pytest.approx(1.5)
        share = 4 * step.all_to_all / (4 * step.all_to_all + 3 * (step.attention + step.experts))
        assert share == pytest.approx(2 * step.shares[2] / 100)


@pytest.mark.parametrize("length", [4, 16])
def test_every_scheme_is_proved_and_does_the_same_work_with_the_same_bytes(length):
    cal = Calibration(length, "step")
    unit = 3 * (cal.attention + cal.experts)
    for s in schemes(cal, RATE, Links(bandwidth=RATE), {}, full=True):
        verify(s.schedule, s.wiring)
        run = s.simulate(Links(bandwidth=RATE))
        work = sum(run.busy[g] * s.wiring.size(g) for g in s.wiring.groups)
        assert work == pytest.approx(LAYERS * WORLD * ROUNDS * unit), s.name
        carried = sum(run.carried[g][0] * s.wiring.size(g) for g in s.wiring.groups)
        exchanged = 4 * LAYERS * WORLD * ROUNDS * cal.all_to_all
        assert exchanged * (1 - 1e-9) <= carried <= 1.1 * exchanged, s.name


def test_rows_of_the_real_exchange_have_the_modelled_bytes():
    from benchmarks.emulated_cluster_model import TOKENS
    from benchmarks.emulated_cluster_ranks import row_width

    cal = Calibration(4, "step")
    for s in schemes(cal, RATE, Links(bandwidth=RATE), {}):
        if s.placement is not None:
            m, n = s.placement.attention[0], s.placement.ffn[0]
            record = -(-(4 * row_width(s) + 8) // 16) * 16  # fp32 row, one gate, one id, padded
            sent = m * (TOKENS + n) * record  # one header per message
            assert sent == pytest.approx(s.costs.message["dispatch"], rel=0.01)
    assert work_of(cal, RATE).ranks == WORLD


def test_what_emulated_ranks_cannot_do_is_named():
    from benchmarks.emulated_cluster_ranks import ColocatedRole

    scheme = schemes(Calibration(4, "step"), RATE, Links(bandwidth=RATE), {})[0]
    role = ColocatedRole(scheme, None, None, 0)  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match=r"3UNSHARD0: emulated ranks have no parameters.*leave UNSHARD"):
        role.shard(Action.parse("3UNSHARD0"))


def test_missing_rights_are_said_in_one_sentence_and_do_not_fail(monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "root" in (emulated_cluster_net.missing() or "")
    assert emulated_cluster.main(["--quick"]) == 0
    assert capsys.readouterr().out.startswith("not measured: emulated nodes need root")


def result(gain: float, error: float, others: float = 0.0) -> dict:
    row = {"scheme": "x", "family": "AF-Pipe", "gain": gain, "error": error}
    return {"results": {"4K step": {"rows": [row], "others": others}}}


@pytest.mark.parametrize(
    ("gain", "error", "others", "good", "text"),
    [
        (1.6, 0.05, 0.0, True, "4K step 1.60x"),
        (1.49, 0.05, 0.0, False, "MISSED 4K step: 1.49x, goal 1.5x"),
        (1.6, -0.11, 0.0, False, "simulation -11.0 % off"),
        (1.2, 0.3, 0.5, True, "not measured: 4K step \\(others used 50 %"),
    ],
)
def test_the_verdict_misses_what_is_missed_and_says_when_a_machine_was_loaded(gain, error, others, good, text):
    import re

    ok, line = emulated_cluster.verdict(result(gain, error, others), loopback=False)
    assert ok == good and re.search(text, line)
