"""verify(): accepts what runs, refuses what does not, and says why. The judge is the sim transport."""

import random
import threading

import pytest
import torch

from torchmoe.comm.transport import P2P
from torchmoe.errors import ExchangeError, ScheduleError
from torchmoe.pipeline.action import Action, Op, Schedule
from torchmoe.pipeline.costs import Costs
from torchmoe.pipeline.lower import KINDS, lower, message_layer
from torchmoe.pipeline.network import Links
from torchmoe.pipeline.schedules.afpipe import AFPipeSchedule
from torchmoe.pipeline.schedules.colocated import ColocatedWiring, colocated
from torchmoe.pipeline.schedules.pipeline import gpipe, interleaved_1f1b, one_f_one_b
from torchmoe.pipeline.schedules.zero_bubble import dualpipev, zb_h1
from torchmoe.pipeline.simulate import simulate
from torchmoe.pipeline.verify import verify
from torchmoe.placement import Placement
from torchmoe.testing.sim import SimHub, SimTransport


def place(p: int, num_layers: int, p_ffn: int | None = None) -> Placement:
    return Placement(attention=[1] * p, ffn=[1] * (p_ffn or p), num_layers=num_layers, num_experts=4)


# ---- generated schedules
@pytest.mark.parametrize("p", range(1, 9))
def test_every_generator_is_accepted_up_to_eight_ranks_and_thirty_two_micro_batches(p):
    for n in (1, 2, 5, 8, 17, 32):
        for schedule in (
            gpipe(p, n),
            one_f_one_b(p, n),
            interleaved_1f1b(p, n),
            interleaved_1f1b(p, n, num_chunks=3),
            zb_h1(p, n),
        ):
            verify(schedule)
        if n >= 2 * p:
            verify(dualpipev(p, n))
            verify(dualpipev(p, n, overlap=False))
    for n in (1, 8, 13):
        verify(AFPipeSchedule(place(p, p), n), place(p, p))


@pytest.mark.parametrize("groups", [(1, 1), (2, 1), (2, 2), (4, 1)])
def test_colocated_baselines_are_accepted_in_all_three_forms(groups):
    for parts, overlap in ((1, False), (4, False), (1, True)):
        wiring = ColocatedWiring(num_layers=4, ep_size=4, num_groups=groups[0], num_chunks=groups[1], a2a_chunks=parts)
        for n in (1, 2, 3, 8):
            verify(colocated(wiring, n, overlap=overlap), wiring)


# ---- numbers in the report
def test_message_counts_are_the_closed_forms():
    """2 M (vP - 1) for looped pipelines, 2 M v (P - 1) for V shapes (distributed.md 2.2)."""
    assert sum(verify(one_f_one_b(8, 32)).messages.values()) == 448
    assert sum(verify(interleaved_1f1b(8, 32)).messages.values()) == 960
    assert sum(verify(dualpipev(8, 32)).messages.values()) == 896
    placement = Placement(attention=[3, 2], ffn=[2, 4], num_layers=3, num_experts=4)
    report = verify(AFPipeSchedule(placement, 5), placement)
    pairs_af = 3 * 2 + 2 * 4 + 3 * 2  # layers 0, 1, 2: A0F0, A1F1, A0F0
    assert report.messages["dispatch"] == report.messages["counts"] == report.messages["d_dispatch"] == 5 * pairs_af
    assert report.messages["combine"] == report.messages["d_combine"] == 5 * (2 * 2 + 4 * 3 + 2 * 2)
    assert report.messages["residual"] == report.messages["ids"] == 5 * 3 * 4  # thirds against halves overlap in four pairs


def test_peaks_of_live_stages_are_the_closed_forms():
    assert verify(gpipe(4, 8)).peak_live == {"0": 8, "1": 8, "2": 8, "3": 8}
    assert verify(one_f_one_b(4, 8)).peak_live == {"0": 4, "1": 3, "2": 2, "3": 1}
    assert verify(interleaved_1f1b(4, 8)).peak_live == {"0": 11, "1": 9, "2": 7, "3": 5}  # 5.5 .. 2.5 whole shares
    assert verify(zb_h1(8, 16)).peak_live == {str(r): 8 for r in range(8)}
    assert verify(dualpipev(4, 8)).peak_live == {str(r): 9 for r in range(4)}  # 2p + 1 half shares
    assert verify(zb_h1(8, 16)).peak_held == {str(r): r + 1 for r in range(8)}


# ---- torch's tables
def torch_table(name: str, ranks: int, n: int, per_rank: int) -> str:
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    rows = get_schedule_ops(name, ranks, n, num_stages_per_rank=per_rank)
    return "\n".join(",".join("" if a is None else str(a) for a in row) for row in rows)


@pytest.mark.parametrize("name", ["GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])
def test_tables_of_torch_load_dump_their_own_actions_and_pass(name):
    per_rank = 1 if name == "GPipe" else 2
    text = torch_table(name, 4, 8, per_rank)
    schedule = Schedule.load(text)
    verify(schedule)
    cells = [[c for c in row.split(",") if c] for row in text.splitlines()]
    assert [row.split(",") for row in schedule.dump().splitlines()] == cells
    assert Schedule.load(schedule.dump()) == schedule


@pytest.mark.parametrize("name", ["Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"])
def test_tables_that_torch_lowered_itself_pass_without_waits_of_their_own(name):
    from torch.distributed.pipelining import schedules as torch_schedules

    ops = {
        rank: [torch_schedules._Action.from_str(c) for c in row.split(",") if c]
        for rank, row in enumerate(torch_table(name, 4, 8, 2).splitlines())
    }
    looped = name == "Interleaved1F1B"
    home = (lambda s: s % 4) if looped else (lambda s: min(s, 7 - s))
    lowered = torch_schedules._add_send_recv(ops, home, 8)
    text = "\n".join(",".join(map(str, lowered[r])) for r in range(4))
    schedule = Schedule.load(text)
    assert schedule.lowered
    report = verify(schedule)
    assert sum(report.messages.values()) == 2 * 8 * (7 if looped else 6)


def test_dualpipev_is_torchs_table():
    for ranks, n in ((2, 4), (4, 8), (4, 11), (8, 20)):
        assert dualpipev(ranks, n).lists == Schedule.load(torch_table("DualPipeV", ranks, n, 2)).lists


def test_the_table_of_torch_that_lacks_a_forward_is_refused():
    """torch 2.13's 1F1B table for the visualiser starts the last rank at micro-batch 1; its own validator lets it pass."""
    with pytest.raises(ScheduleError, match=r"missing|comes before|not part|below"):
        verify(Schedule.load(torch_table("1F1B", 4, 8, 1)))


# ---- refusals with reasons
def test_a_hand_made_deadlock_prints_its_cycle():
    bad = Schedule.load("0F0,0F1,0B1,0B0\n1F0,1F1,1B0,1B1\n")
    with pytest.raises(ScheduleError, match="meets"):  # gradients leave 0, 1 and are expected 1, 0
        verify(bad)
    text = "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n"
    with pytest.raises(ScheduleError, match=r"meets|deadlock"):
        verify(Schedule.load(text))
    cyc = Schedule.load("0F0,0B0,2F0,2B0\n1F0,1B0,3F0,3B0\n")
    with pytest.raises(ScheduleError, match=r"deadlock: .*0 waits at 0WAIT_B0:grad.*1 waits at 1WAIT_B0:grad.*cycle closes"):
        verify(cyc)


def test_a_cycle_of_p_deadlocks_which_is_why_it_is_refused():
    """Interleaved order with G = p = 2 on the A/F chain of 4, built by hand past AFPipeSchedule's refusal."""
    from torchmoe.pipeline.schedules.afpipe import _chain_order, _Group

    placement = place(2, 4)
    lengths = (2, 2, 2, 2)
    lists = {}
    for g in placement.groups():
        order = _chain_order(_Group(g, placement, lengths), 2, 4, lengths)
        lists[str(g)] = tuple(Action(s, op, m) for op, s, m in order)
    with pytest.raises(ScheduleError, match="deadlock"):
        verify(Schedule(lists, 8), placement)


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (lambda a: a[:-1], "missing|never|no 1W0"),
        (lambda a: [*a, a[-1]], "twice"),
        (lambda a: [a[1], a[0], *a[2:]], "before"),
        (lambda a: [*a, Action(9, Op.FORWARD, 0)], "no unit of this model"),
        (lambda a: [*a, Action(1, Op.FORWARD)], "names no micro-batch"),
        (lambda a: [*a, Action(1, Op.FORWARD, 7)], "micro-batch below"),
        (lambda a: [*a, Action(0, Op.FORWARD, 0)], "unit 0 is on A0"),
        (lambda a: [x for x in a if x.op is not Op.SEND_F], "never sent"),
        (lambda a: [x for x in a if x.op is not Op.WAIT_F], "before"),
    ],
)
def test_each_kind_of_edit_is_named(edit, text):
    placement = place(1, 1)
    good = lower(AFPipeSchedule(placement, 1), placement, look_ahead=0)
    lists = dict(good.lists) | {"F0": tuple(edit(list(good.lists["F0"])))}
    with pytest.raises(ScheduleError, match=text):
        verify(Schedule(lists, 1, lowered=True), placement)


def test_more_live_units_than_memory_allows_are_refused():
    with pytest.raises(ScheduleError, match=r"A0 has .* live units, memory allows 3"):
        verify(AFPipeSchedule(place(1, 3), 4), place(1, 3), max_live=3)


def test_lists_for_other_groups_are_refused():
    with pytest.raises(ScheduleError, match="the layout has A0, F0"):
        verify(AFPipeSchedule(place(2, 2), 4), place(1, 2))


# ---- mutants against the sim transport
def mutate(lists: dict[str, list[Action]], rng: random.Random, n: int) -> None:
    acts = lists[rng.choice(list(lists))]
    for _ in range(rng.randint(1, 2)):
        i, j = rng.randrange(len(acts)), rng.randrange(len(acts))
        what = rng.randrange(6)
        if what == 0:
            acts[i], acts[j] = acts[j], acts[i]
        elif what == 1:
            j = min(i + 1, len(acts) - 1)
            acts[i], acts[j] = acts[j], acts[i]
        elif what == 2:
            acts.insert(j, acts.pop(i))
        elif what == 3:
            acts.insert(max(0, min(i + rng.choice((-3, -2, 2, 3)), len(acts) - 1)), acts.pop(i))
        elif what == 4 and rng.random() < 0.3:
            acts.insert(j, acts[i]) if rng.random() < 0.5 else acts.pop(i)
        elif acts[i].op in (Op.RECV_F, Op.RECV_B, Op.SEND_F, Op.SEND_B):
            k = next((k for k in range(i + 1, len(acts)) if acts[k].op == acts[i].op), i)
            acts[i], acts[k] = acts[k], acts[i]


class Judge:
    """Runs lists on the sim transport like the runner would: real messages, local state, nothing else known."""

    def __init__(self, placement: Placement, schedule: Schedule, residual: str, *, fixed: bool = False) -> None:
        self.pl, self.schedule, self.residual, self.fixed = placement, schedule, residual, fixed
        self.hub = SimHub(placement.world_size, mode="comm")
        self.bad: list[str] = []

    def runs(self) -> bool:
        threads = [threading.Thread(target=self._rank, args=(r,), daemon=True) for r in range(self.pl.world_size)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(20)
            assert not t.is_alive()
        return not self.bad

    def _rank(self, rank: int) -> None:
        transport = SimTransport(self.hub, rank, 0, self.pl.communicators(self.residual), record=False)
        try:
            self._list(rank, transport)
            self.hub.leave(rank)
        except Exception as e:
            self.bad.append(f"rank {rank}: {e!r}")
            self.hub.leave(rank, repr(e))
            self.hub.fail(ExchangeError("over"))

    def _require(self, condition: bool, what: object) -> None:
        if not condition:
            raise RuntimeError(f"state: {what}")

    def _over(self, *messages: tuple[str, int, int]) -> list[tuple[str, int, int]]:
        """Those of the hand-over between attention groups that this residual has."""
        kept = [x for x in messages if self.pl.hands_over(x[1])]
        return [x for x in kept if "residual" not in x[0] or self.residual != "ride"]

    def _list(self, rank: int, transport: SimTransport) -> None:
        group = self.pl.where(rank).group
        head, n = 2 * self.pl.num_layers, self.schedule.num_microbatches
        got: set[tuple[str, int, int]] = set()
        ran: set[tuple[str, int, int]] = set()
        sent: set[tuple[str, int, int]] = set()
        open_recvs, open_sends = {}, []
        for a in self.schedule.lists[str(group)]:
            s, m = a.stage, a.microbatch
            self._require(self.pl.stage_group(s) == group, a)
            if a.edge is None:
                op = a.op.value
                self._require((op, s, m) not in ran, a)
                layer = s // 2
                need: list[tuple[str, int, int]] = []
                if op == "F" and s % 2:
                    need = [("dispatch", layer, m)] + ([] if self.fixed else [("counts", layer, m)])
                elif op == "F" and s:
                    need = [("combine", layer - 1, m), *self._over(("ids", layer - 1, m), ("residual", layer - 1, m))]
                    if s == head and self.pl.head == "ffn":
                        need.append(("labels", layer - 1, m))
                elif op in ("B", "I"):
                    self._require(("F", s, m) in ran and ("B" if op == "I" else "I", s, m) not in ran, a)
                    if s % 2:
                        need = [("d_combine", layer, m)]
                    elif s < head:
                        need = [("d_dispatch", layer, m), *self._over(("d_residual", layer, m))]
                elif op == "W":
                    self._require(("I", s, m) in ran, a)
                self._require(all(x in got for x in need), a)
                ran.add((op, s, m))
                continue
            layer = message_layer(a)
            key = (a.edge, layer, m)
            communicator = self.pl.communicator(a.edge, layer)
            source, destination = self.pl.edge(a.edge, layer)
            label = torch.tensor([list(KINDS).index(a.edge), layer, m], dtype=torch.uint8)
            if a.op in (Op.SEND_F, Op.SEND_B):
                back = "I" if s % 2 and ("I", s, m) in ran else "B"
                self._require(("F" if a.op is Op.SEND_F else back, s, m) in ran and key not in sent, a)
                sent.add(key)
                if source == destination:  # one rank: its own memory
                    continue
                open_sends.append(transport.post(communicator, [P2P("send", self.pl.ranks(destination)[0], label)], str(a)))
            elif a.op in (Op.RECV_F, Op.RECV_B):
                self._require(key not in open_recvs and key not in got, a)
                if source == destination:
                    open_recvs[key] = None
                    continue
                buffer = torch.zeros(3, dtype=torch.uint8)
                work = transport.post(communicator, [P2P("recv", self.pl.ranks(source)[0], buffer)], str(a))
                open_recvs[key] = (work, buffer, label)
            else:
                opened = open_recvs.pop(key)
                if opened is None:
                    self._require(key in sent, a)
                else:
                    work, buffer, label = opened
                    work.wait(20)
                    self._require(torch.equal(buffer, label), a)
                got.add(key)
        for work in open_sends:
            work.wait(20)
        self._require(not open_recvs, "receives left")
        for s in self.pl.stages(group):
            for m in range(n):
                split = ("I", s, m) in ran and ("W", s, m) in ran
                self._require(("F", s, m) in ran and (("B", s, m) in ran or split), ("incomplete", s, m))


def lowered_base(rng: random.Random, most_groups: int, most_batches: int) -> tuple[Placement, str, bool, Schedule]:
    """A random layout with one rank a group, and a random schedule for it."""
    layers = rng.randint(1, 2 * most_groups)
    pa, pf = (rng.randint(1, min(most_groups, layers)) for _ in range(2))
    head = rng.choice(("attention", "ffn"))
    placement = Placement(attention=[1] * pa, ffn=[1] * pf, num_layers=layers, num_experts=4, head=head)
    residual = rng.choice((placement.default_residual, "ride"))
    p, n, fixed = max(pa, pf), rng.randint(1, most_batches), rng.random() < 0.3
    order = AFPipeSchedule(
        placement,
        n,
        cycle=rng.randint(2 * p, 4 * p + 3),
        weights_held=rng.choice((0, 0, 1, 4)),
        seconds=(rng.choice((0.0, 0.5, 1.0, 3.0)), rng.choice((0.5, 1.0, 2.0))),
        transfer=rng.choice((0.0, 0.5, 1.0, 4.0)),
    )
    schedule = lower(order, placement, residual=residual, look_ahead=rng.choice((0, 1, 2, 9)), fixed_sizes=fixed)
    return placement, residual, fixed, schedule


@pytest.mark.parametrize("seed", range(4))
def test_random_layouts_are_accepted_run_and_simulate(seed):
    """Both heads, every residual, pA != pF, L not divisible by p, weights apart: generator, proof, transport and simulator."""
    rng = random.Random(seed)
    for _ in range(4):
        placement, residual, fixed, schedule = lowered_base(rng, 8, 12)
        report = verify(schedule, placement, residual=residual)
        assert Schedule.load(schedule.dump()) == schedule
        judge = Judge(placement, schedule, residual, fixed=fixed)
        assert judge.runs(), judge.bad
        costs = Costs(message=dict.fromkeys(KINDS, 1.0), activation=1.0)
        for issue in ("inline", "ahead"):
            run = simulate(schedule, costs, placement, residual=residual, links=Links(bandwidth=3.0), issue=issue)
            acts = {g: [a for a in lists if a.is_compute] for g, lists in schedule.lists.items()}
            assert run.busy == {g: pytest.approx(sum(map(costs.seconds, a))) for g, a in acts.items()}
            computed = [e for e in run.events if e.kind == "compute"]
            assert len(computed) == sum(map(len, acts.values()))
            assert all(run.peak_memory[g] >= n for g, n in report.peak_live.items())  # live units, and messages


def test_halves_of_an_exchange_inside_a_group_find_each_other_in_any_order():
    """The runtime posts both halves together when the second one comes, so receives may be posted in another order than sends."""
    placement = Placement(attention=[1], ffn=[1], num_layers=1, num_experts=4, head="ffn")
    good = lower(AFPipeSchedule(placement, 2), placement)
    acts = list(good.lists["F0"])
    acts.remove(posted := Action(2, Op.RECV_F, 1, "combine"))
    acts.insert(acts.index(Action(2, Op.RECV_F, 0, "combine")), posted)
    swapped = Schedule(dict(good.lists) | {"F0": tuple(acts)}, 2, lowered=True)
    assert verify(swapped, placement) == verify(good, placement)
    assert Judge(placement, swapped, "local").runs()
    acts.remove(sent := Action(1, Op.SEND_F, 0, "combine"))
    acts.insert(acts.index(Action(2, Op.WAIT_F, 0, "combine")) + 1, sent)
    with pytest.raises(ScheduleError, match=r"comes before|deadlock: F0 waits at 2WAIT_F0:combine"):
        verify(Schedule(dict(good.lists) | {"F0": tuple(acts)}, 2, lowered=True), placement)


def test_the_verdict_on_a_thousand_mutants_is_that_of_the_sim_transport():
    rng = random.Random(5)
    bases = [lowered_base(rng, 2, 4) for _ in range(25)]
    verdicts = {True: 0, False: 0}
    for i in range(1000):
        placement, residual, fixed, base = bases[i % len(bases)]
        lists = {g: list(acts) for g, acts in base.lists.items()}
        mutate(lists, rng, base.num_microbatches)
        mutant = Schedule({g: tuple(acts) for g, acts in lists.items()}, base.num_microbatches, lowered=True)
        try:
            verify(mutant, placement, residual=residual)
            accepted, reason = True, "accepted"
        except ScheduleError as e:
            accepted, reason = False, str(e)
        judge = Judge(placement, mutant, residual, fixed=fixed)
        assert judge.runs() == accepted, f"{reason} but {judge.bad or 'it runs'}\n{placement} {residual}\n{mutant.dump()}"
        verdicts[accepted] += 1
    assert min(verdicts.values()) > 150, verdicts  # both verdicts were tried
