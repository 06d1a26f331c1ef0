"""Placement: every rank, layer, expert and sequence has exactly one home, whatever the sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmoe.errors import ConfigError
from torchmoe.placement import Deadlines, GroupId, Placement, Where, contiguous_owners, split_range


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    layers = draw(st.integers(1, 7))
    sizes = st.lists(st.integers(1, 5), min_size=1, max_size=min(3, layers))
    return Placement(
        attention=draw(sizes),
        ffn=draw(sizes),
        num_layers=layers,
        num_experts=draw(st.integers(1, 13)),
        replicas=draw(st.integers(1, 3)),
    )


@given(placements())
def test_every_rank_has_one_place_and_every_place_one_rank(pl: Placement) -> None:
    places = [pl.where(r) for r in range(pl.world_size)]
    assert len(set(places)) == pl.world_size
    for rank, w in enumerate(places):
        assert pl.ranks(w.group, w.replica)[w.index] == rank


@given(placements())
def test_every_unit_runs_on_one_group(pl: Placement) -> None:
    units = [u for g in pl.groups() for u in pl.stages(g)]
    assert sorted(units) == list(range(2 * pl.num_layers + 1))
    for layer in range(pl.num_layers):
        assert 2 * layer in pl.stages(pl.attention_group(layer))
        assert 2 * layer + 1 in pl.stages(pl.ffn_group(layer))


@given(placements())
def test_every_expert_has_one_owner(pl: Placement) -> None:
    for layer in range(pl.num_layers):
        n = pl.size(pl.ffn_group(layer))
        held = [e for i in range(n) for e in pl.local_experts(layer, i)]
        assert sorted(held) == list(range(pl.num_experts))
        sizes = [len(pl.local_experts(layer, i)) for i in range(n)]
        assert max(sizes) - min(sizes) <= 1


@given(placements(), st.integers(0, 17))
def test_every_sequence_is_on_one_rank_of_every_attention_group(pl: Placement, batch: int) -> None:
    for group in pl.groups("attention"):
        held = [q for rep in range(pl.replicas) for i in range(pl.size(group)) for q in pl.sequences(group, i, batch, rep)]
        assert held == list(range(batch))


@given(placements(), st.integers(0, 17))
def test_overlaps_cover_a_rank_once_and_are_symmetric(pl: Placement, batch: int) -> None:
    for a in pl.groups("attention"):
        for b in pl.groups("attention"):
            for rep in range(pl.replicas):
                for i in range(pl.size(a)):
                    parts = pl.overlaps(a, i, b, batch, rep)
                    assert [q for _, r in parts for q in r] == list(pl.sequences(a, i, batch, rep))
                    for j, r in parts:
                        assert (i, r) in pl.overlaps(b, j, a, batch, rep)


@given(placements())
def test_every_message_has_a_communicator_that_holds_both_ends(pl: Placement) -> None:
    residual = pl.default_residual
    comms = pl.communicators(residual)
    assert len({(c.name, c.ranks) for c in comms}) == len(comms)
    kinds = ["counts", "dispatch", "combine", "d_combine", "d_dispatch"]
    kinds += ["ids", "residual", "d_residual"] if len(pl.attention) > 1 else []
    for rep in range(pl.replicas):
        for kind in kinds:
            for layer in range(pl.num_layers):
                src, dst = pl.edge(kind, layer)
                name = pl.communicator(kind, layer)
                for s in pl.ranks(src, rep):
                    for d in pl.ranks(dst, rep):
                        if s != d:
                            assert sum(c.name == name and s in c.ranks and d in c.ranks for c in comms) == 1


@given(placements())
def test_json_round_trip_and_fingerprint(pl: Placement) -> None:
    same = Placement.from_json(pl.to_json())
    assert same == pl and same.fingerprint() == pl.fingerprint()
    other = Placement.from_json(pl.to_json().replace(f'"num_experts": {pl.num_experts}', f'"num_experts": {pl.num_experts + 1}'))
    assert other.fingerprint() != pl.fingerprint()


@given(placements())
def test_gradients_of_attention_are_summed_over_the_group_in_all_replicas(pl: Placement) -> None:
    for g in pl.groups("attention"):
        want = [r for r in range(pl.world_size) if pl.where(r).group == g]
        assert list(pl.attention_gradient_ranks(g)) == want
    for g in pl.groups("ffn"):
        for i in range(pl.size(g)):
            want = [r for r in range(pl.world_size) if (pl.where(r).group, pl.where(r).index) == (g, i)]
            assert list(pl.expert_gradient_ranks(g, i)) == want


@given(st.integers(0, 40), st.integers(1, 9))
def test_split_is_contiguous_and_even(n: int, parts: int) -> None:
    pieces = [split_range(3, 3 + n, parts, i) for i in range(parts)]
    assert [q for p in pieces for q in p] == list(range(3, 3 + n))
    assert max(map(len, pieces)) - min(map(len, pieces)) <= 1


def test_uneven_experts() -> None:
    assert contiguous_owners(6, 4) == (0, 0, 1, 1, 2, 3)
    assert contiguous_owners(2, 3) == (0, 1)


def test_the_model_error_text() -> None:
    pl = Placement(attention=[2, 2], ffn=[1, 1], num_layers=4, num_experts=8)
    with pytest.raises(ConfigError) as e:
        pl.check_world(5)
    assert str(e.value) == ("world size 5: attention=[2, 2] ffn=[1, 1] needs 6; start 6 processes or change the group sizes")


@pytest.mark.parametrize(
    "change, word",
    [
        ({"attention": []}, "attention=[]"),
        ({"ffn": [1, 0]}, "ffn=[1, 0]"),
        ({"attention": [1] * 5}, "5 groups for 4 MoE layers"),
        ({"attention": 2}, "attention=2: every group"),
        ({"attention": [True]}, "attention=[True]"),
        ({"num_layers": 1.5}, "num_layers=1.5 must be a whole number"),
        ({"num_experts": 2.5}, "num_experts=2.5"),
        ({"replicas": 1.5}, "replicas=1.5"),
        ({"deadlines": 5}, "deadlines=5"),
        ({"owners": [[0.5, 0.5]] * 4}, "owners[0]=[0.5, 0.5]"),
        ({"num_experts": 0}, "num_experts=0"),
        ({"replicas": 0}, "replicas=0"),
        ({"owners": [[0, 0]]}, "owners has 1 layers"),
        ({"owners": [[0, 5]] * 4}, "owners[0]=[0, 5]"),
    ],
)
def test_bad_sizes_are_refused_with_the_value(change: dict[str, object], word: str) -> None:
    good: dict[str, object] = {"attention": [2], "ffn": [2], "num_layers": 4, "num_experts": 2}
    with pytest.raises(ConfigError) as e:
        Placement(**(good | change))  # type: ignore[arg-type]
    assert word in str(e.value)


def test_questions_about_what_is_not_there_are_refused() -> None:
    pl = Placement(attention=[2], ffn=[3], num_layers=2, num_experts=6)
    group = pl.where(0).group
    for call, text in (
        (lambda: pl.local_experts(2, 0), r"layer 2 is outside \[0, 2\)"),
        (lambda: pl.local_experts(0, 3), "rank 3 of F0"),
        (lambda: pl.sequences(group, 2, 8), "rank 2 of A0"),
        (lambda: pl.sequences(group, 0, -1), "batch=-1"),
        (lambda: pl.communicators("remote"), "residual='remote' is unknown"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ConfigError, match=text):
            call()


def test_residual_modes_need_their_groups() -> None:
    one = Placement(attention=[2], ffn=[1], num_layers=2, num_experts=2)
    two = Placement(attention=[1, 1], ffn=[1], num_layers=2, num_experts=2)
    assert (one.default_residual, two.default_residual) == ("local", "direct")
    with pytest.raises(ConfigError, match="direct"):
        one.check_residual("direct")
    with pytest.raises(ConfigError, match="local"):
        two.check_residual("local")


@pytest.mark.parametrize("times", [(0.0, 1.0, 2.0), (2.0, 1.0, 3.0), (1.0, 1.0, 3.0)])
def test_deadlines_must_ascend(times: tuple[float, float, float]) -> None:
    with pytest.raises(ConfigError, match="ascending"):
        Deadlines(exchange=times[0], step=times[1], init=times[2])


def test_explain_names_every_group() -> None:
    pl = Placement(attention=[2, 1], ffn=[1, 2], num_layers=5, num_experts=6)
    text = pl.explain()
    assert "A0: ranks 0-1, attention of embedding, 0, 2, 4" in text and "A1: ranks 2-2, attention of 1, 3, head" in text
    assert pl.where(4) == Where(0, GroupId("ffn", 1), 0)
