"""Pictures come from events alone and show every one of them; the comparison command prints what the simulator says."""

import itertools
import json
import re
import xml.etree.ElementTree as ET

import pytest

from torchmoe.errors import ConfigError
from torchmoe.pipeline.cli import main
from torchmoe.pipeline.compare import UnitCosts, Work, af_scheme, colocated_scheme, comparison
from torchmoe.pipeline.costs import Costs
from torchmoe.pipeline.network import Links
from torchmoe.pipeline.pictures import perfetto, strip
from torchmoe.pipeline.schedules.afpipe import AFPipeSchedule
from torchmoe.pipeline.schedules.pipeline import one_f_one_b
from torchmoe.pipeline.simulate import simulate
from torchmoe.pipeline.svg import compare_svg, stack_svg, svg
from torchmoe.placement import Placement

PLACEMENT = Placement(attention=[1, 1], ffn=[1, 1], num_layers=3, num_experts=4)


def events():
    c = Costs(message=dict.fromkeys(("dispatch", "combine", "d_combine", "d_dispatch"), 0.5))
    return simulate(AFPipeSchedule(PLACEMENT, 4), c, PLACEMENT, links=Links(bandwidth=1.0)).events


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


def check_trace(text: str) -> list[dict]:
    """The rules of the trace event format that viewers rely on."""
    trace = json.loads(text, parse_constant=lambda x: pytest.fail(f"{x} is not JSON"))
    assert set(trace) <= {"traceEvents", "displayTimeUnit"} and trace["displayTimeUnit"] in ("ms", "ns")
    slices: dict[tuple[int, int], list[tuple[float, float]]] = {}
    names: dict[str, set[object]] = {"process_name": set(), "thread_name": set()}
    flows: dict[int, dict[str, dict]] = {}
    for e in trace["traceEvents"]:
        assert isinstance(e["pid"], int) and isinstance(e["tid"], int) and isinstance(e["name"], str)
        if e["ph"] == "M":
            assert isinstance(e["args"]["name"], str)
            key = e["pid"] if e["name"] == "process_name" else (e["pid"], e["tid"])
            assert key not in names[e["name"]]  # named once
            names[e["name"]].add(key)
        elif e["ph"] == "X":
            assert e["ts"] >= 0 and e["dur"] >= 0 and isinstance(e["cat"], str)
            slices.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
        else:
            assert e["ph"] in ("s", "f") and (e["ph"] == "s" or e["bp"] == "e")
            assert e["ph"] not in flows.setdefault(e["id"], {})
            flows[e["id"]][e["ph"]] = e
    assert set(slices) == names["thread_name"] and {pid for pid, _ in slices} == names["process_name"]
    for spans in slices.values():  # slices of a thread lie side by side
        spans.sort()
        assert all(a[1] <= b[0] * (1 + 1e-12) + 1e-6 for a, b in itertools.pairwise(spans))
    for pair in flows.values():  # both ends, in order, each inside a slice of its thread
        assert set(pair) == {"s", "f"} and pair["s"]["ts"] <= pair["f"]["ts"]
        assert all(pair["s"][k] == pair["f"][k] for k in ("name", "cat"))
        for e in pair.values():
            assert any(a - 1e-6 <= e["ts"] <= b + 1e-6 for a, b in slices[e["pid"], e["tid"]])
    return trace["traceEvents"]


def test_perfetto_obeys_the_trace_event_format():
    es = events()
    trace = check_trace(perfetto(es))
    assert sum(e["ph"] == "X" for e in trace) == len(es)
    check_trace(perfetto(es, node=lambda r: r // 2))
    late = [e._replace(start=e.start - 0.3) if e.kind in ("send", "recv", "wait") and e.start >= 0.3 else e for e in es]
    trace = check_trace(perfetto(late))  # messages and waits that overlap, as in measured runs
    assert any(e["ph"] == "M" and e["args"]["name"].endswith(" 2") for e in trace)


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


SVG = "{http://www.w3.org/2000/svg}"


def texts(picture: str) -> list[str]:
    return [t.text or "" for t in ET.fromstring(picture).iter(f"{SVG}text")]


def test_svg_is_xml_with_a_bar_per_event_and_says_ranks_times_and_bubble():
    es = events()
    picture = svg(es, num_units=7, title="a < b & c")
    titles = [t.text or "" for t in ET.fromstring(picture).iter(f"{SVG}title")]
    assert len(titles) == len(es) and sum("compute" in t for t in titles) == sum(e.kind == "compute" for e in es)
    found = texts(picture)
    end = max(e.end for e in es if e.kind == "compute")
    busy = max(sum(e.end - e.start for e in es if e.kind == "compute" and e.rank == r) for r in range(4))
    assert {"a < b & c", f"step {end:.4g} s, bubble {1 - busy / end:.0%}", "A0[0]", "F1[0]", "0 s", "5 s"} <= set(found)
    assert {"attention forward", "experts backward", "head", "wait", "send", "recv"} <= set(found)  # the legend
    assert "weight gradient" in found and "forward" not in found
    with pytest.raises(ConfigError, match="no events"):
        svg([])


def test_runs_lie_over_each_other_and_layouts_below_each_other():
    es = events()
    assert {"A0[0] measured", "A0[0] simulated", "F1[0] measured"} <= set(texts(compare_svg({"measured": es, "simulated": es})))
    plain = simulate(one_f_one_b(2, 2), Costs()).events
    picture = stack_svg({"A/F": {"measured": es}, "1F1B": {"measured": plain}}, num_units=7)
    found = texts(picture)
    assert {"A/F", "1F1B", "A0[0]", "1[0]"} <= set(found) and "send" not in found
    bars = sum((path.get("d") or "").count("M") for path in ET.fromstring(picture).iter(f"{SVG}path"))
    assert bars == sum(e.kind == "compute" for e in [*es, *plain])


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
