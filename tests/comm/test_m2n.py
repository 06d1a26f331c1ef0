"""M2NExchange: outputs and all gradients equal one process, for every layout and setting."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.comm.toy import Toy, gathered, random_toy, reference, run_rank
from torchmoe.comm.m2n import Key, M2NExchange
from torchmoe.comm.transport import P2P
from torchmoe.placement import Placement
from torchmoe.testing import assert_close_rel, run_ranks


def check(toy: Toy, backend: str = "sim", mode: str = "async", debug: bool = False) -> list[dict[str, object]]:
    ranks = run_ranks(run_rank, toy.placement.world_size, backend=backend, args=(toy, debug), mode=mode)
    h, grads = gathered(toy, ranks)
    want_h, want = reference(toy)
    tolerance = 1e-12 if toy.dtype == torch.float64 else 1e-5
    assert_close_rel(h, want_h, rel=tolerance, name="h")
    for name, value in want.items():
        assert_close_rel(grads[name], value, rel=tolerance * (100 if toy.dtype == torch.float64 else 1), name=name)
    return ranks


@pytest.mark.parametrize(("m", "n"), list(itertools.product(range(1, 6), repeat=2)))
def test_every_m_and_n_equals_one_process(m: int, n: int) -> None:
    check(random_toy([m], [n], seed=10 * m + n, layers=2))


@pytest.mark.parametrize("residual", ["direct", "ride"])
@pytest.mark.parametrize(
    ("attention", "ffn"), [((1, 1), (1, 1)), ((2, 1), (1, 2)), ((2, 3, 1), (2, 1, 2)), ((3, 2), (2,)), ((1, 2), (3,))]
)
def test_several_groups_of_any_size_equal_one_process(attention: tuple[int, ...], ffn: tuple[int, ...], residual: str) -> None:
    check(random_toy(attention, ffn, layers=4, settings={"residual": residual}))


@pytest.mark.parametrize("mode", ["async", "comm"])
@pytest.mark.parametrize(
    ("attention", "ffn", "settings"),
    [
        ((2,), (3,), {}),
        ((2, 1), (1, 2), {"residual": "direct"}),
        ((1, 2), (2,), {"residual": "ride"}),
        ((3,), (2,), {"combine": "slots"}),
    ],
)
def test_a_head_on_the_last_expert_ranks_equals_one_process(
    attention: tuple[int, ...], ffn: tuple[int, ...], settings: dict[str, object], mode: str
) -> None:
    check(random_toy(attention, ffn, layers=3, settings=settings, head="ffn"), mode=mode)


@pytest.mark.parametrize(("m", "n"), [(1, 1), (2, 3), (3, 2)])
def test_ride_on_one_attention_group_equals_one_process(m: int, n: int) -> None:
    check(random_toy([m], [n], layers=2, settings={"residual": "ride"}))


@pytest.mark.parametrize(("attention", "ffn"), [((2,), (3,)), ((3,), (1,)), ((2, 1), (1, 2))])
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_slots_equal_one_process(attention: tuple[int, ...], ffn: tuple[int, ...], top_k: int) -> None:
    check(random_toy(attention, ffn, top_k=top_k, layers=3, settings={"combine": "slots"}))


@pytest.mark.parametrize("overflow", ["raise", "grow"])
@pytest.mark.parametrize(
    ("attention", "ffn", "residual"), [((2,), (3,), "local"), ((2, 2), (1, 2), "direct"), ((2, 2), (2,), "ride")]
)
def test_fixed_sizes_that_fit_equal_one_process(
    attention: tuple[int, ...], ffn: tuple[int, ...], residual: str, overflow: str
) -> None:
    capacity = 11 if overflow == "raise" else 1
    check(
        random_toy(
            attention,
            ffn,
            layers=3,
            settings={"sizes": "fixed", "capacity": capacity, "overflow": overflow, "residual": residual},
        )
    )


@pytest.mark.parametrize("mode", ["comm", "rank"])
def test_no_deadlock_where_operations_wait_for_earlier_ones(mode: str) -> None:
    check(random_toy([2, 1], [1, 2], layers=3), mode=mode)


@pytest.mark.parametrize("settings", [{}, {"combine": "slots"}, {"sizes": "fixed", "capacity": 12}])
def test_debug_mode_changes_nothing(settings: dict[str, object]) -> None:
    check(random_toy([2], [3], settings=settings), debug=True)


def test_single_precision_is_within_1e_5() -> None:
    check(random_toy([3], [2], layers=2, dtype=torch.float32))


def test_replicas_equal_one_process() -> None:
    check(random_toy([1, 2], [2], layers=3, replicas=2))


@pytest.mark.parametrize(
    "toy",
    [
        random_toy([5], [3], layers=2),
        random_toy([2, 1], [1, 2], layers=3),
        random_toy([2, 1], [1, 2], layers=3, settings={"residual": "ride"}),
        random_toy([2], [2], top_k=4, settings={"combine": "slots"}),
        random_toy([2], [3], settings={"sizes": "fixed", "capacity": 12}),
    ],
    ids=["5A3F", "direct", "ride", "slots", "fixed"],
)
def test_gloo_processes_equal_one_process(toy: Toy) -> None:
    check(toy, backend="gloo")


@pytest.mark.parametrize("world", [64, 256])
def test_many_simulated_ranks_equal_one_process(world: int) -> None:
    """Three quarters attention; most ranks have one token or none, most experts are idle."""
    m = world * 3 // 4
    check(random_toy([m], [world - m], num_experts=world, lengths=tuple(q % 3 for q in range(m)), dim=4))


def test_everything_dropped_and_no_tokens_at_all() -> None:
    none = ((-1, -1),)
    check(Toy((2,), (2,), ((none * 3, none, (), none),), 3))
    check(Toy((2,), (2,), (((), (), ()),), 3))


def test_a_rank_without_experts_and_all_tokens_on_one_expert() -> None:
    ids = tuple(((0, 3),) * n for n in (2, 4, 1))
    check(Toy((3,), (3,), (ids,), 4, owners=((0, 2, 2, 0),)))


class Wire:
    """Notes the receivers of every post, in order."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.peers: list[list[int]] = []

    def post(self, communicator: str, ops: list[P2P], what: str) -> Wire:
        self.peers.append([op.peer for op in ops])
        return self

    def done(self) -> bool:
        return True

    def wait(self, timeout: float) -> None:
        return None


@pytest.mark.parametrize("ffn", [2, 3, 4])
def test_the_ranks_of_a_group_begin_with_different_receivers(ffn):
    """All with the first one would take 1.75 times as long on links that serve messages in turn (4 to 4)."""
    pl = Placement(attention=[3], ffn=[ffn], num_layers=1, num_experts=ffn)
    ids_TK = torch.arange(ffn)[:, None]
    orders = []
    for rank in range(3):
        wire = Wire(rank, pl.world_size)
        exchange = M2NExchange(pl, wire, dim=4, top_k=1)
        route, key = exchange.route(0, ids_TK), Key(0, 0)
        exchange.send_dispatch(key, route, torch.zeros(ffn, 4), torch.ones(ffn, 1), ids_TK).wait()
        exchange.send_d_combine(key, route, torch.zeros(ffn, 4)).wait()
        orders += wire.peers
        assert wire.peers[0] == wire.peers[1] and sorted(wire.peers[0]) == list(range(3, 3 + ffn))
    assert len({order[0] for order in orders}) == min(3, ffn)
