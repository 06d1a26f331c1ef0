"""Pictures come from events alone and show every one of them; the comparison command prints what the simulator says."""

import json
import re
import xml.etree.ElementTree as ET

import pytest

from torchmoe.errors import ConfigError
from torchmoe.pipeline.cli import main
from torchmoe.pipeline.compare import UnitCosts, Work, af_scheme, colocated_scheme, comparison
from torchmoe.pipeline.costs import Costs
from torchmoe.pipeline.network import Links
from torchmoe.pipeline.pictures import compare_svg, perfetto, strip, svg
from torchmoe.pipeline.schedules.afpipe import afpipe
from torchmoe.pipeline.schedules.pipeline import one_f_one_b
from torchmoe.pipeline.simulate import simulate
from torchmoe.placement import Placement

PLACEMENT = Placement(attention=[1, 1], ffn=[1, 1], num_layers=3, num_experts=4)


def events():
    c = Costs(message=dict.fromkeys(("dispatch", "combine", "d_combine", "d_dispatch"), 0.5))
    return simulate(afpipe(PLACEMENT, 4), c, PLACEMENT, links=Links(bandwidth=1.0)).events


def test_perfetto_has_every_event_and_one_arrow_per_message():
    es = events()
    trace = json.loads(perfetto(es))["traceEvents"]
    spans = [e for e in trace if e["ph"] == "X"]
    assert len(spans) == len(es)
    sends = [e for e in es if e.kind == "send"]
    starts, ends = ([e for e in trace if e["ph"] == ph] for ph in "sf")
    assert len(starts) == len(ends) == len(sends)
    by_id = {e["id"]: e for e in starts}
    assert all(e["ts"] >= by_id[e["id"]]["ts"] and e["tid"] != by_id[e["id"]]["tid"] for e in ends)
    assert {e["pid"] for e in json.loads(perfetto(es, node=lambda r: r // 2))["traceEvents"]} == {0, 1}


def test_a_measured_run_without_peers_gets_arrows_by_layer_and_micro_batch():
    es = [e._replace(peer=None, action=e.action.replace("SEND", "WAIT") if e.kind == "recv" else e.action) for e in events()]
    renamed = []
    for e in es:  # a runner names a receive by the wait of the receiving unit
        if e.kind == "recv":
            kind = e.action.split(":")[1]
            stage = int(re.match(r"\d+", e.action).group()) + {
                "counts": 1,
                "dispatch": 1,
                "combine": 1,
                "ids": 2,
                "residual": 2,
            }.get(kind, -1 if kind != "d_residual" else -2)
            e = e._replace(action=re.sub(r"^\d+", str(stage), e.action))
        renamed.append(e)
    trace = json.loads(perfetto(renamed))["traceEvents"]
    assert sum(e["ph"] == "s" for e in trace) == sum(e.kind == "send" for e in renamed)


def test_svg_is_xml_with_a_bar_per_event_and_runs_lie_over_each_other():
    es = events()
    root = ET.fromstring(svg(es, num_units=7, title="a < b & c"))
    titles = [t.text for t in root.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == len(es) and sum("compute" in t for t in titles) == sum(e.kind == "compute" for e in es)
    both = ET.fromstring(compare_svg({"measured": es, "simulated": es}, num_units=7))
    labels = [t.text for t in both.iter("{http://www.w3.org/2000/svg}text")]
    assert "A0 rank 0 measured" in labels and "A0 rank 0 simulated" in labels
    with pytest.raises(ConfigError, match="no events"):
        svg([])


def test_the_strip_shows_one_line_per_rank_with_its_bubbles():
    run = simulate(one_f_one_b(2, 2), Costs())
    text = strip(run.events, width=9)  # 2 x 3 of work, a bubble of 3
    assert text.splitlines() == ["0 0 |FF..BBBB.|".replace("FF..BBBB.", text.splitlines()[0][5:-1]), text.splitlines()[1]]
    cells = [line[line.index("|") + 1 : -1] for line in text.splitlines()]
    assert [len(c) for c in cells] == [9, 9]
    assert cells[1][0] == "." and [sum(c.count(x) for x in "FB") for c in cells] == [6, 6]
    assert strip([]) == ""


def work(**more) -> Work:
    costs = UnitCosts(attention=3.0, experts=2.0, all_to_all=2.0, hand_over=0.25, attention_bytes=4.0, experts_bytes=3.0)
    return Work(**({"costs": costs, "ranks": 8, "layers": 4, "rounds": 2, "links": Links(bandwidth=1.0)} | more))


def test_every_scheme_of_a_comparison_does_the_same_work_and_carries_the_same_bytes():
    total_seconds = 4 * (8 * 2) * (3.0 + 2.0) * 3  # layers x units x forward and twice that backward
    for scheme in comparison(work()):
        run = scheme.simulate(Links(bandwidth=1.0))
        done = sum(run.busy[g] * scheme.wiring.size(g) for g in scheme.wiring.groups)
        assert done == pytest.approx(total_seconds), scheme.name
        carried = sum(run.carried[g][0] * scheme.wiring.size(g) for g in scheme.wiring.groups)
        exchanged = 4 * 4 * 16 * 2.0  # four transfers a layer
        assert exchanged <= carried <= exchanged * 1.2, scheme.name


def test_af_pipe_beats_blocking_expert_parallelism_where_transfers_are_half_the_step():
    w = work(layers=8, rounds=4)
    blocking = colocated_scheme(w, groups=2, chunks=4).simulate(w.links).makespan
    assert blocking / af_scheme(w, p=1, attention=5, cycle=4).simulate(w.links).makespan > 1.4


def test_the_command_prints_the_table_and_writes_pictures(tmp_path, capsys):
    file = tmp_path / "costs.json"
    costs = {"attention": 0.02, "experts": 0.01, "all_to_all": 1e5}
    file.write_text(json.dumps({"ranks": 7, "layers": 2, "rounds": 2, "costs": costs, "links": {"bandwidth": 1e7}}))
    assert main(["--costs", str(file), "--ranks", "4", "--pictures", str(tmp_path / "p")]) == 0
    out = capsys.readouterr().out
    assert "4 ranks, 2 layers" in out and "AF-Pipe p=1" in out and "EP4, blocking" in out
    names = [p.name for p in (tmp_path / "p").iterdir()]
    assert "comparison.svg" in names and sum(n.endswith(".json") for n in names) >= 4


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"costs": {"attention": -1, "experts": 1, "all_to_all": 1}}, "attention=-1"),
        ({"costs": {"attention": 1}}, "experts"),
        ({"ranks": 0}, "ranks=0"),
        ({"ranks": 1}, "at least 2 ranks"),
        ({"surprise": 1}, "surprise"),
        ({"links": {"bandwidth": 0}}, "bandwidth=0"),
    ],
)
def test_bad_cost_files_are_refused(tmp_path, change, text):
    good = {"ranks": 4, "layers": 2, "rounds": 2, "costs": {"attention": 1, "experts": 1, "all_to_all": 1}}
    file = tmp_path / "costs.json"
    file.write_text(json.dumps(good | change))
    with pytest.raises(ConfigError, match=text):
        main(["--costs", str(file)])
    with pytest.raises(ConfigError, match="No such file"):
        main(["--costs", str(tmp_path / "none.json")])
