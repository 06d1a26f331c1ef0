"""TopKRouter and the balancing losses. Parity with transformers' routers is in tests/integrations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from torchmoe.errors import ConfigError, RoutingError
from torchmoe.router import TopKRouter, global_balance_loss, load_counts, sequence_balance_loss, updated_bias, z_loss


@pytest.mark.parametrize("E", [1, 2, 3, 64, 100, 128, 129, 256, 512])
@pytest.mark.parametrize("kind", ["random", "ties", "nan", "inf"])
def test_selection_equals_torch_topk(E: int, kind: str) -> None:
    """MetaX-MACA/vLLM-metax#270: a fused top-k was wrong at (E, k) = (128, 8). Every k in 1..16, ties, NaN and inf."""
    g = torch.Generator().manual_seed(E)
    scores = torch.rand(17, E, generator=g)
    if kind == "ties":
        scores = (scores * 3).round()
    if kind in ("nan", "inf"):
        scores[torch.rand(17, E, generator=g) < 0.2] = float(kind)
    for k in range(1, min(E, 16) + 1):
        router = TopKRouter(4, E, k, selection_bias=False)
        ids = router.select(scores)
        assert torch.equal(ids.long(), scores.topk(k, dim=-1).indices) and ids.dtype == torch.int32
        assert int(ids.min()) >= 0 and int(ids.max()) < E


def test_one_expert_with_normalised_gates_is_refused_and_the_default_trains() -> None:
    """NVIDIA/Megatron-LM#894, jingyaogong/minimind#858: with k = 1 a normalised gate is the constant 1."""
    with pytest.raises(ConfigError, match="top_k=1 with normalize=True"):
        TopKRouter(8, 4, 1, normalize=True)
    router = TopKRouter(8, 4, 1)
    routing = router(torch.randn(6, 8))
    assert routing.gates_TK.shape == (6, 1)
    routing.gates_TK.sum().backward()
    assert router.weight_ED.grad is not None and float(router.weight_ED.grad.norm()) > 0


def test_logits_are_fp32_whatever_comes_in() -> None:
    """sgl-project/sglang#38695, vllm-ascend PR#17068: bf16 logits send 5 % of the tokens elsewhere; also under autocast."""
    x = torch.randn(10000, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    router = TopKRouter(64, 32, 4)
    want = router.select(router.scores(x.double() @ router.weight_ED.double().t())).sort(-1).values
    for cast in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=cast):
            routing = router(x)
        assert routing.gates_TK.dtype == torch.float32
        same = (routing.expert_ids_TK.sort(-1).values == want).all(-1).double().mean()
        assert float(same) > 0.999
    rounded = router.select(router.scores((x @ router.weight_ED.bfloat16().t()).float())).sort(-1).values
    assert float((rounded == want).all(-1).double().mean()) < 0.995  # about 1 % go elsewhere


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_groups_limit_the_choice_to_the_best_groups(data: st.DataObject) -> None:
    groups, size = data.draw(st.integers(1, 4)), data.draw(st.integers(2, 4))
    top_groups = data.draw(st.integers(1, groups))
    k = data.draw(st.integers(1, min(top_groups * size, 6)))
    how = data.draw(st.sampled_from(["top2", "max"]))
    router = TopKRouter(4, groups * size, k, num_groups=groups, top_groups=top_groups, group_score=how)
    assert router.expert_bias_E is not None
    router.expert_bias_E.copy_(torch.randn(groups * size) * 0.1)
    scores = torch.rand(5, groups * size)
    ids = router.select(scores)
    for t in range(5):
        choice = (scores[t] + router.expert_bias_E).reshape(groups, size)
        worth = choice.sort(-1).values[:, -2:].sum(-1) if how == "top2" else choice.max(-1).values
        kept = set(worth.argsort(descending=True)[:top_groups].tolist())
        allowed = {e: float(choice.flatten()[e]) for e in range(groups * size) if e // size in kept}
        assert set(ids[t].tolist()) == set(sorted(allowed, key=lambda e, a=allowed: -a[e])[:k])


def test_the_selection_bias_moves_the_choice_and_never_the_gates() -> None:
    router = TopKRouter(4, 6, 2, score="sigmoid")
    x = torch.randn(9, 4)
    plain = router(x)
    assert router.expert_bias_E is not None
    router.expert_bias_E[3] = 10.0
    biased = router(x)
    assert (biased.expert_ids_TK == 3).any(-1).all()
    scores = router.scores(router.logits(x))
    assert torch.equal(biased.gates_TK, scores.gather(-1, biased.expert_ids_TK.long()))
    replayed = router(x, replay_TK=plain.expert_ids_TK)
    assert torch.equal(replayed.expert_ids_TK, plain.expert_ids_TK) and torch.equal(replayed.gates_TK, plain.gates_TK)


def test_replayed_ids_carry_gradient_and_dropped_slots_none() -> None:
    router = TopKRouter(4, 6, 2, normalize=True)
    ids = torch.tensor([[1, -1], [0, 5]])
    routing = router(torch.randn(2, 4), replay_TK=ids)
    assert routing.gates_TK[0].tolist() == [1.0, 0.0]
    routing.gates_TK[1, 0].backward()
    assert router.weight_ED.grad is not None and router.weight_ED.grad.abs().sum() > 0
    with pytest.raises(RoutingError, match="does not fit"):
        router(torch.randn(3, 4), replay_TK=ids)


@pytest.mark.parametrize("K", [1, 2, 8])
def test_uniform_routing_has_loss_one_for_every_k(K: int) -> None:
    """AI-Hypercomputer/maxtext PR#1433: the scale of a balancing loss must not depend on k."""
    E = 16
    ids = torch.stack([(torch.arange(K) + t) % E for t in range(E)])
    scores = torch.full((E, E), 1.0 / E)
    assert float(sequence_balance_loss(scores, ids, [E])) == pytest.approx(1.0, rel=1e-6)
    assert float(global_balance_loss(scores, load_counts(ids, E), E, top_k=K)) == pytest.approx(1.0, rel=1e-6)


def test_losses_are_equal_for_every_split_into_ranks_and_micro_batches() -> None:
    """Per-sequence and global losses, values and gradients: two ranks with two micro-batches, against one device."""
    torch.manual_seed(0)
    lengths, E, K = [5, 3, 7, 1], 6, 2
    router = TopKRouter(4, E, K, sequence_loss=0.3).double()
    x = torch.randn(sum(lengths), 4, dtype=torch.float64)
    whole = router(x, lengths=lengths)
    scores = router.scores(router.logits(x))
    counts = load_counts(whole.expert_ids_TK, E)
    total = whole.aux + global_balance_loss(scores, counts, len(x), top_k=K) + z_loss(router.logits(x), len(x))
    (want,) = torch.autograd.grad(total, router.weight_ED)
    parts, summed = list(x.split(lengths)), torch.zeros_like(counts)
    for part in parts:
        summed += load_counts(router(part).expert_ids_TK, E)
    assert torch.equal(summed, counts)
    got, value = torch.zeros_like(want), 0.0
    for part in parts:
        routing = router(part, lengths=[len(part)], loss_weight=1.0 / len(lengths))
        local = router.logits(part)
        assert routing.aux is not None
        loss = routing.aux + global_balance_loss(router.scores(local), summed, len(x), top_k=K) + z_loss(local, len(x))
        got += torch.autograd.grad(loss, router.weight_ED)[0]
        value += float(loss.detach())
    assert value == pytest.approx(float(total.detach()), rel=1e-12)
    assert (got - want).norm() < 1e-12 * want.norm()


def test_losses_are_bit_equal_from_run_to_run() -> None:
    """NVIDIA/Megatron-LM#7221: atomics in the auxiliary loss."""
    router = TopKRouter(8, 16, 4, sequence_loss=1.0)
    x = torch.randn(300, 8)
    values = []
    for _ in range(5):
        router.zero_grad()
        aux = router(x, lengths=[100, 200]).aux
        assert aux is not None
        aux.backward()
        assert router.weight_ED.grad is not None
        values.append((aux.detach(), router.weight_ED.grad.clone()))
    for aux, grad in values[1:]:
        assert torch.equal(aux, values[0][0]) and torch.equal(grad, values[0][1])


def test_the_loss_is_returned_and_leaves_nothing_behind() -> None:
    """databricks/megablocks#134: lists that are empty in eval or leak across steps."""
    router = TopKRouter(8, 4, 2, sequence_loss=1.0)
    x = torch.randn(6, 8)
    first = router.train()(x).aux
    state = {k: v.clone() for k, v in router.state_dict().items()}
    with torch.no_grad():
        evaluated = router.eval()(x).aux
    again = router.train()(x).aux
    assert first is not None and evaluated is not None and again is not None
    assert torch.equal(first, again) and torch.equal(first, evaluated) and not evaluated.requires_grad
    for name, value in router.state_dict().items():
        assert torch.equal(value, state[name])


def test_bias_update_pushes_towards_balance_and_ignores_a_common_factor() -> None:
    bias = torch.tensor([0.1, 0.0, -0.2, 0.0])
    counts = torch.tensor([9, 1, 5, 5])
    new = updated_bias(bias, counts, rate=0.01)
    assert torch.allclose(new - bias, torch.tensor([-0.01, 0.01, 0.0, 0.0]), atol=1e-7)
    assert torch.equal(new, updated_bias(bias, counts * 2, rate=0.01))
    torch.manual_seed(0)
    router = TopKRouter(8, 8, 2, score="sigmoid")
    x = torch.randn(4000, 8) + 0.7
    before = load_counts(router(x).expert_ids_TK, 8)
    for _ in range(300):
        router.update_bias(load_counts(router(x).expert_ids_TK, 8), rate=5e-3)
    after = load_counts(router(x).expert_ids_TK, 8)
    assert float(after.double().std()) < 0.3 * float(before.double().std())
    with pytest.raises(ConfigError, match="selection_bias=False"):
        TopKRouter(8, 8, 2, selection_bias=False).update_bias(after)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"score": "tanh"}, "tanh"),
        ({"top_k": 9}, "top_k=9"),
        ({"top_k": 2.0}, "top_k=2.0 must be a whole number"),
        ({"scale": 0.0}, "scale=0.0"),
        ({"scale": float("nan")}, "scale=nan"),
        ({"sequence_loss": -0.1}, "sequence_loss=-0.1"),
        ({"num_groups": 4}, "go together"),
        ({"num_groups": 3, "top_groups": 1}, "must divide"),
        ({"num_groups": 4, "top_groups": 1, "top_k": 3}, "must hold top_k=3"),
        ({"num_groups": 8, "top_groups": 4}, "use 'max'"),
        ({"num_groups": 4, "top_groups": 2, "group_score": "mean"}, "mean"),
    ],
)
def test_refused_values_are_named(options: dict[str, Any], text: str) -> None:
    arguments = {"top_k": 2, **options}
    with pytest.raises(ConfigError, match=text):
        TopKRouter(4, 8, arguments.pop("top_k"), **arguments)


def test_refused_calls_are_named() -> None:
    router = TopKRouter(4, 8, 2)
    for call, text in (
        (lambda: router(torch.ones(3, 4, dtype=torch.long)), "torch.int64"),
        (lambda: router(torch.ones(3, 4, dtype=torch.complex64)), "complex64"),
        (lambda: router(torch.ones(3, 4, device="meta")), "on meta and the router on cpu"),
        (lambda: router.update_bias(torch.zeros(3)), r"counts \(3,\) must be \[8\]"),
        (lambda: TopKRouter(0, 8, 2), "dim=0"),
    ):
        with pytest.raises(ConfigError, match=text):
            call()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_selection_bias_stays_fp32_in_a_cast_module(dtype: torch.dtype) -> None:
    """At 1.0 a step of 1e-3 is lost in bf16 and fp16 alike; it must not be."""
    router = TopKRouter(4, 2, 1)
    router.expert_bias_E = torch.tensor([1.0, 1.0 + 1e-5])
    cast = nn.Sequential(router).to(dtype)[0]
    assert cast.weight_ED.dtype == dtype and cast.expert_bias_E.tolist() == torch.tensor([1.0, 1.0 + 1e-5]).tolist()
    cast.update_bias(torch.tensor([0, 4]), rate=1e-4)
    assert cast.expert_bias_E[0] > 1.0
    assert cast.double().expert_bias_E.dtype == torch.float64
    with torch.device("meta"):
        empty = TopKRouter(4, 2, 1).to(dtype).to_empty(device="cpu")
    empty.reset_parameters()
    assert empty.expert_bias_E.dtype == torch.float32 and not empty.expert_bias_E.any()


def test_counts_skip_dropped_slots() -> None:
    assert load_counts(torch.tensor([[0, -1], [2, 2]]), 3).tolist() == [1, 0, 2]


def test_empty_batches_route() -> None:
    router = TopKRouter(4, 3, 2, sequence_loss=1.0)
    routing = router(torch.zeros(0, 4))
    assert routing.expert_ids_TK.shape == (0, 2) and routing.aux is not None and float(routing.aux) == 0.0
    with pytest.raises(ConfigError, match="lengths sum to 3"):
        router(torch.zeros(2, 4), lengths=[3])


def test_replayed_ids_that_are_none_are_refused() -> None:
    router, x = TopKRouter(4, 8, 2), torch.randn(3, 4)
    with pytest.raises(RoutingError, match="integers"):
        router(x, replay_TK=torch.zeros(3, 2))
    with pytest.raises(RoutingError, match="expert 8 and there are 8"):
        router(x, replay_TK=torch.full((3, 2), 8))


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), -1.0])
def test_a_rate_that_would_spoil_the_bias_is_refused(rate: float) -> None:
    router = TopKRouter(4, 8, 2, selection_bias=True)
    with pytest.raises(ConfigError, match="rate"):
        router.update_bias(torch.ones(8), rate=rate)
    assert router.expert_bias_E is not None and not router.expert_bias_E.any()
