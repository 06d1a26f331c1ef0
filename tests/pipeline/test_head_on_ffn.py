"""Head and loss on the F group of the last layer: units, edges and schedules."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from torchmoe.pipeline.lower import lower
from torchmoe.pipeline.schedules.afpipe import AFPipeSchedule
from torchmoe.pipeline.verify import verify
from torchmoe.placement import Placement, Residual


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    layers = draw(st.integers(1, 5))
    sizes = st.lists(st.integers(1, 3), min_size=1, max_size=min(3, layers))
    return Placement(attention=draw(sizes), ffn=draw(sizes), num_layers=layers, num_experts=4, head="ffn")


@settings(max_examples=40)
@given(placements(), st.integers(1, 13), st.booleans())
def test_every_schedule_is_free_of_deadlock(pl: Placement, microbatches: int, ride: bool) -> None:
    residual: Residual = "ride" if ride else pl.default_residual
    schedule = lower(AFPipeSchedule(pl, microbatches), pl, residual=residual)
    verify(schedule, pl, residual=residual)
    head = 2 * pl.num_layers
    assert pl.stage_group(head) == pl.stage_group(head - 1)


@given(placements())
def test_labels_ids_and_residual_go_to_the_head_and_nowhere_else_twice(pl: Placement) -> None:
    last = pl.num_layers - 1
    edges = {k: [n for n in range(pl.num_layers) if pl.has_edge(k, n, "direct")] for k in ("labels", "ids", "residual")}
    assert edges["labels"] == [last]
    assert last in edges["ids"] and edges["ids"] == edges["residual"]
    assert pl.edge("combine", last) == (pl.head_group, pl.head_group)
