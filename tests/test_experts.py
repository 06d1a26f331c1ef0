"""FusedExpertMLP against the fp64 oracle, and its promises: bit-equal save modes, exact zeros, determinism, split form."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.experts_kit import EPS, GATED, PLAIN, errors, experts, inputs, routings, run, split_grads, truth
from torchmoe.dispatch import DispatchQueue
from torchmoe.errors import ConfigError
from torchmoe.experts import FusedExpertMLP, RankExperts

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("name", routings())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_output_and_all_gradients_equal_the_oracle(name: str, dtype: torch.dtype) -> None:
    """huggingface/transformers#45621, PR#48689 (router gradient), pytorch/pytorch#193633, databricks/megablocks PR#87 (k = 1)."""
    ids = routings()[name]
    module = experts(7, 6, 5, dtype=dtype)
    x, gates, dy = inputs(ids, 6, dtype)
    worst = errors(run(module, ids, x, gates, dy), truth(module, ids, x, gates, dy))
    assert max(worst.values()) < EPS[dtype], worst


@pytest.mark.parametrize(("activation", "bias"), itertools.product(GATED + PLAIN, (False, True)))
def test_every_activation_with_and_without_bias_equals_the_oracle(activation: str, bias: bool) -> None:
    ids = routings()["random"]
    module = experts(7, 6, 5, activation=activation, bias=bias, dtype=torch.float64)
    x, gates, dy = inputs(ids, 6, torch.float64)
    worst = errors(run(module, ids, x, gates, dy), truth(module, ids, x, gates, dy))
    assert max(worst.values()) < 1e-12, worst


def test_clamped_swiglu_beyond_its_bounds_equals_the_oracle() -> None:
    """GPT-OSS clamps at 7: inputs large enough that every clamp acts, in both directions."""
    ids = routings()["random"]
    module = experts(7, 6, 5, activation="clamped_swiglu", bias=True, dtype=torch.float64)
    x, gates, dy = inputs(ids, 6, torch.float64)
    with torch.no_grad():
        x *= 12
    worst = errors(run(module, ids, x, gates, dy), truth(module, ids, x, gates, dy))
    assert max(worst.values()) < 1e-12, worst


@pytest.mark.parametrize(("D", "F"), [(6, 5), (64, 32), (97, 47), (1, 1)])
@pytest.mark.parametrize("E", [1, 2, 64, 129])
def test_any_width_and_any_number_of_experts(D: int, F: int, E: int) -> None:
    """pytorch/torchtitan#1651, huggingface/transformers#48644: no alignment rule; E = 129 has mostly empty experts."""
    ids = torch.randint(0, E, (12, 2), generator=torch.Generator().manual_seed(2))
    module = experts(E, D, F, dtype=torch.float64)
    x, gates, dy = inputs(ids, D, torch.float64)
    worst = errors(run(module, ids, x, gates, dy), truth(module, ids, x, gates, dy))
    assert max(worst.values()) < 1e-12, worst


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_random_routings_widths_and_modes_equal_the_oracle(data: st.DataObject) -> None:
    T, K = data.draw(st.integers(0, 9)), data.draw(st.integers(1, 5))
    E, D, F = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 7)), data.draw(st.integers(1, 7))
    flat = data.draw(st.lists(st.integers(-1, E - 1), min_size=T * K, max_size=T * K))
    ids = torch.tensor(flat, dtype=torch.int64).reshape(T, K)
    activation = data.draw(st.sampled_from(GATED + PLAIN))
    gated = activation in GATED
    module = experts(
        E,
        D,
        F,
        activation=activation,
        bias=data.draw(st.booleans()),
        save=data.draw(st.sampled_from(["input", "half", "preact", "all"] if gated else ["input", "preact", "all"])),
        layout=data.draw(st.sampled_from(["split", "concat", "interleaved"] if gated else ["split"])),
        chunk_tokens=data.draw(st.sampled_from([None, 1, 4])),
        dtype=torch.float64,
    )
    x, gates, dy = inputs(ids, D, torch.float64)
    worst = errors(run(module, ids, x, gates, dy), truth(module, ids, x, gates, dy))
    assert max(worst.values()) < 1e-11, worst


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ["swiglu", "clamped_swiglu", "gelu"])
@pytest.mark.parametrize(("T", "E", "D", "F"), [(130, 7, 32, 48), (1050, 3, 7, 13), (300, 5, 97, 47)])
def test_gradients_are_bit_equal_in_every_save_mode(activation: str, dtype: torch.dtype, T: int, E: int, D: int, F: int) -> None:
    """At odd widths too, where experts start at unaligned rows, and over several blocks of one expert."""
    ids = torch.randint(-1, E, (T, 3), generator=torch.Generator().manual_seed(0))
    results = []
    for save in ("input", "half", "preact", "all"):
        if save == "half" and activation == "gelu":
            continue
        module = experts(E, D, F, activation=activation, bias=True, save=save, dtype=dtype)
        x, gates, dy = inputs(ids, D, dtype)
        results.append(run(module, ids, x, gates, dy))
        for p in module.parameters():
            p.grad = None
        y, saved = module.forward_saved(x.detach(), DispatchQueue.build(ids, E), gates.detach())
        dx, dgates, work = module.backward_input(saved, dy)
        work.run()
        wide = split_grads(module)
        narrow = {n: g.to(results[0][n].dtype) for n, g in wide.items()}
        results.append({"y": y, "x": dx, "gates": dgates, **narrow})
    for other in results[1:]:
        for name, value in results[0].items():
            assert torch.equal(value, other[name]), name


def test_empty_expert_gradient_is_zero_and_not_none() -> None:
    """pytorch/pytorch#172439, openxla/tokamax#887: groups without rows must not read what memory holds (here: NaN)."""
    ids = torch.full((8, 1), 2)
    module = experts(6, 6, 5, bias=True)
    x, gates, dy = inputs(ids, 6, torch.float32)
    poison = [torch.full((6, 5, 6), float("nan")) for _ in range(40)]
    del poison
    run(module, ids, x, gates, dy)
    for grad in split_grads(module).values():
        others = [e for e in range(6) if e != 2]
        assert torch.equal(grad[others], torch.zeros_like(grad[others])) and grad[2].abs().sum() > 0


def test_no_tokens_give_zero_gradients_not_none() -> None:
    """NVIDIA/TransformerEngine PR#3019, pytorch/torchtitan PR#1166: T = 0 keeps the weights in the graph."""
    ids = torch.zeros(0, 2, dtype=torch.long)
    module = experts(3, 6, 5, bias=True)
    x, gates, dy = inputs(ids, 6, torch.float32)
    got = run(module, ids, x, gates, dy)
    assert got["y"].shape == (0, 6) and got["x"].shape == (0, 6) and got["gates"].shape == (0, 2)
    assert all(p.grad is not None and not p.grad.any() for p in module.parameters())


def test_what_stands_in_a_dropped_slot_never_spreads() -> None:
    """pytorch/pytorch#193633, huggingface/transformers PR#48205: NaN in x, dy and gate of dropped slots."""
    ids = torch.tensor([[0, -1], [-1, -1], [6, 3], [2, -1]])
    module = experts(7, 6, 5, bias=True, dtype=torch.float64)
    x, gates, dy = inputs(ids, 6, torch.float64)
    clean = run(module, ids, x, gates, dy)
    with torch.no_grad():
        x[1], dy[1] = float("nan"), float("inf")
        gates[ids < 0] = float("nan")
    dirty = run(module, ids, x, gates, dy)
    for name, value in dirty.items():
        assert torch.equal(value, clean[name]), name
    assert not dirty["y"][1].any() and not dirty["x"][1].any() and not dirty["gates"][ids < 0].any()


def test_a_nan_row_stays_in_its_row() -> None:
    """CK/aiter fp16 overflow note: one bad token does not touch the outputs and input gradients of others."""
    ids = torch.randint(0, 7, (20, 3), generator=torch.Generator().manual_seed(5))
    module = experts(7, 6, 5)
    x, gates, dy = inputs(ids, 6, torch.float32)
    clean = run(module, ids, x, gates, dy)
    with torch.no_grad():
        x[4] = float("nan")
    dirty = run(module, ids, x, gates, dy)
    others = torch.arange(20) != 4
    for name in ("y", "x", "gates"):
        assert torch.equal(dirty[name][others], clean[name][others])
        assert dirty[name][4].isnan().all()


def test_fp16_products_beyond_the_range_do_not_poison_other_tokens() -> None:
    """CK/aiter overflow note: gate * up = 1e5 exceeds fp16; A saturates to inf in that row only."""
    ids = torch.tensor([[0], [0]])
    module = experts(1, 4, 4, dtype=torch.float16)
    with torch.no_grad():
        module.w1_EFD.fill_(80.0)
        module.w3_EFD.fill_(80.0)
        module.w2_EDF.fill_(1.0)
    x, gates, dy = inputs(ids, 4, torch.float16)
    with torch.no_grad():
        x[0], x[1] = 1.0, 0.01
    got = run(module, ids, x, gates, dy)
    assert got["y"][0].isinf().all()
    assert got["y"][1].isfinite().all() and got["x"][1].isfinite().all() and got["gates"][1].isfinite().all()


def test_runs_and_row_order_are_bit_equal_with_and_without_deterministic_mode() -> None:
    """pytorch/torchtitan PR#1974, #2775; mlc-ai/pith-train PR#5: 20 runs, the same bits."""
    ids = torch.randint(-1, 7, (64, 4), generator=torch.Generator().manual_seed(1))
    module = experts(7, 24, 40, bias=True)
    first = run(module, ids, *inputs(ids, 24, torch.float32))
    for i in range(20):
        torch.use_deterministic_algorithms(i % 2 == 1)
        try:
            again = run(module, ids, *inputs(ids, 24, torch.float32))
        finally:
            torch.use_deterministic_algorithms(False)
        for name, value in first.items():
            assert torch.equal(value, again[name]), name


def test_sums_over_slots_are_rounded_once() -> None:
    """NVIDIA/TransformerEngine#1336: 16 equal rows in bf16 give the exact sum, forward and backward."""
    T, K, E = 3, 16, 16
    ids = torch.arange(E).expand(T, K)
    module = experts(E, 8, 8, dtype=torch.bfloat16)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(p[:1].expand_as(p))
    x, _, dy = inputs(ids, 8, torch.bfloat16)
    gates = torch.full((T, K), 1.0 / 16, requires_grad=True)
    got = run(module, ids, x, gates, dy)
    single = experts(1, 8, 8, dtype=torch.bfloat16)
    with torch.no_grad():
        for p, q in zip(single.parameters(), module.parameters(), strict=True):
            p.copy_(q[:1])
    one = run(single, torch.zeros(T, 1, dtype=torch.long), x, torch.ones(T, 1, requires_grad=True), dy)
    assert torch.equal(got["y"], one["y"])


@pytest.mark.parametrize("K", [1, 2, 3, 8, 16])
def test_bf16_error_does_not_grow_with_k(K: int) -> None:
    """NVIDIA/TransformerEngine#1336."""
    E = 16
    g = torch.Generator().manual_seed(K)
    ids = torch.stack([torch.randperm(E, generator=g)[:K] for _ in range(24)])
    module = experts(E, 64, 32, dtype=torch.bfloat16)
    x, gates, dy = inputs(ids, 64, torch.bfloat16)
    worst = errors(run(module, ids, x, gates, dy), truth(module, ids, x, gates, dy))
    assert max(worst.values()) < 8e-3, worst


def test_gate_gradient_at_4096_columns_is_precise() -> None:
    """linkedin/Liger-Kernel fused_moe router gradient: bf16 partial sums over F lose it. Given the stored (rounded) H and A, the
    sum over F is good to fp32, far below one bf16 step."""
    ids = torch.randint(0, 2, (6, 1), generator=torch.Generator().manual_seed(3))
    module = experts(2, 16, 4096, dtype=torch.bfloat16)
    x, gates, dy = inputs(ids, 16, torch.bfloat16)
    got = run(module, ids, x, gates, dy)["gates"].detach()
    for t in range(6):
        e = int(ids[t, 0])
        g, u = (
            (w[e].double() @ x[t].detach().double()).bfloat16().double() for w in (module.w1_EFD.detach(), module.w3_EFD.detach())
        )
        a = (g * torch.sigmoid(g) * u).bfloat16().double()
        da = dy[t].double() @ module.w2_EDF[e].detach().double()
        assert abs(float(got[t, 0]) - float(da @ a)) < 2e-4 * float(da.norm() * a.norm())


@pytest.mark.parametrize("needed", list(itertools.product((False, True), repeat=4)))
def test_every_combination_of_required_gradients(needed: tuple[bool, ...]) -> None:
    """databricks/megablocks memory-optimised mlp raises if any input does not need a gradient."""
    ids = routings()["random"]
    module = experts(7, 6, 5, bias=True, dtype=torch.float64)
    x, gates, dy = inputs(ids, 6, torch.float64)
    want = truth(module, ids, x, gates, dy)
    x.requires_grad_(needed[0])
    gates.requires_grad_(needed[1])
    for name, p in module.named_parameters():
        p.requires_grad_(needed[2] if name.startswith(("w1", "b3")) else needed[3])
    y = module(x, DispatchQueue.build(ids, 7), gates)
    if not any(needed):
        assert not y.requires_grad
        return
    y.backward(dy)
    got = {"x": x.grad, "gates": gates.grad, **{n.split("_")[0]: p.grad for n, p in module.named_parameters()}}
    for name, grad in got.items():
        leaf = {"x": x, "gates": gates}.get(name)
        required = (
            leaf.requires_grad
            if leaf is not None
            else dict(module.named_parameters())[
                next(n for n, _ in module.named_parameters() if n.startswith(name))
            ].requires_grad
        )
        assert (grad is not None) == required, name
        if grad is not None:
            assert (grad - want[name]).norm() <= 1e-12 * want[name].norm(), name


@pytest.mark.parametrize("save", ["input", "half", "preact", "all"])
@pytest.mark.parametrize("chunk", [None, 5])
@pytest.mark.parametrize("layout", ["split", "concat", "interleaved"])
def test_split_form_has_the_bits_of_the_autograd_form(save: str, chunk: int | None, layout: str) -> None:
    ids = routings()["random"]
    module = experts(7, 6, 5, bias=True, save=save, chunk_tokens=chunk, layout=layout)
    x, gates, dy = inputs(ids, 6, torch.float32)
    auto = run(module, ids, x, gates, dy)
    for p in module.parameters():
        p.grad = None
    y, saved = module.forward_saved(x.detach(), DispatchQueue.build(ids, 7), gates.detach())
    dx, dgates, work = module.backward_input(saved, dy)
    assert all(p.grad is None for p in module.parameters())
    work.run()
    got = {"y": y, "x": dx, "gates": dgates, **split_grads(module)}
    for name, value in auto.items():
        assert torch.equal(value, got[name]), name
    with pytest.raises(ConfigError, match="twice"):
        work.run()


def test_weight_work_adds_up_in_fp32_whatever_the_order() -> None:
    """bf16 weights: gradients of many units are added in an fp32 .grad, and late weight work gives the same sums."""
    module = experts(3, 16, 8, dtype=torch.bfloat16)
    ids = torch.randint(-1, 3, (40, 2), generator=torch.Generator().manual_seed(0))
    units = []
    for seed in range(8):
        x, gates, dy = inputs(ids, 16, torch.bfloat16, seed=seed, grad=False)
        _, saved = module.forward_saved(x, DispatchQueue.build(ids, 3), gates)
        units.append((module.backward_input(saved, dy)[2], truth(module, ids, x, gates, dy)))
    for work, _ in units:
        work.run()
    for name, grad in split_grads(module).items():
        assert grad.dtype == torch.float32
        want = sum(t[name] for _, t in units)
        assert (grad.double() - want).norm() < 1e-2 * want.norm()


def test_frozen_weights_have_no_gradient_in_the_split_form() -> None:
    module = experts(3, 6, 5, bias=True)
    module.w1_EFD.requires_grad_(False)
    module.b2_ED.requires_grad_(False)
    ids = torch.randint(0, 3, (4, 2))
    x, gates, dy = inputs(ids, 6, torch.float32, grad=False)
    _, saved = module.forward_saved(x, DispatchQueue.build(ids, 3), gates)
    module.backward_input(saved, dy)[2].run()
    assert module.w1_EFD.grad is None and module.b2_ED.grad is None and module.w3_EFD.grad is not None


@pytest.mark.parametrize("rows", [0, 11])
def test_ranks_add_up_to_the_whole_layer(rows: int) -> None:
    """Logical ids, each expert on one of three ranks (uneven, out of order): sums, dx and dgates equal one device."""
    E, D, F, K = 7, 6, 5, 3
    whole = experts(E, D, F, bias=True, dtype=torch.float64)
    ids = torch.randint(-1, E, (rows, K), generator=torch.Generator().manual_seed(4))
    x, gates, dy = inputs(ids, D, torch.float64, grad=False)
    want = truth(whole, ids, x, gates, dy)
    total = {"y": torch.zeros_like(x), "x": torch.zeros_like(x), "gates": torch.zeros_like(gates)}
    for owned in ((5, 0, 3), (1,), (6, 2, 4)):
        part = FusedExpertMLP(len(owned), D, F, bias=True, dtype=torch.float64)
        with torch.no_grad():
            for p, q in zip(part.parameters(), whole.parameters(), strict=True):
                p.copy_(q[list(owned)])
        rank = RankExperts(part, owned, E)
        y, saved = rank.forward_saved(x, ids.int(), gates)
        dx, dgates, work = rank.backward_input(saved, dy)
        work.run()
        mine = torch.isin(ids, torch.tensor(owned))
        assert not dgates[~mine].any()
        for name, value in (("y", y), ("x", dx), ("gates", dgates)):
            total[name] += value
        for name, grad in split_grads(part).items():
            assert (grad - want[name][list(owned)]).norm() <= 1e-12 * (1 + want[name].norm()), name
    for name, value in total.items():
        assert value.shape == want[name].shape and (value - want[name]).norm() <= 1e-12 * (1 + want[name].norm()), name


def test_gradcheck_in_fp64() -> None:
    ids = torch.tensor([[0, 2], [1, -1], [2, 0]])
    module = experts(3, 4, 3, activation="clamped_swiglu", bias=True, dtype=torch.float64)
    x, gates, _ = inputs(ids, 4, torch.float64)
    queue = DispatchQueue.build(ids, 3)
    names = [n for n, _ in module.named_parameters()]
    leaves = [p.detach().clone().requires_grad_() for p in module.parameters()]

    def call(x: torch.Tensor, gates: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(module, dict(zip(names, weights, strict=True)), (x, queue, gates))

    assert torch.autograd.gradcheck(call, (x, gates, *leaves))


def test_non_contiguous_and_expanded_inputs_work() -> None:
    """F.grouped_mm refuses an expanded gradient (y.sum().backward()) with 'Invalid strides/sizes'."""
    ids = routings()["random"].t().contiguous().t()
    module = experts(7, 6, 5, dtype=torch.float64)
    x, gates, _ = inputs(ids, 6, torch.float64, grad=False)
    dy = torch.ones((), dtype=torch.float64).expand(19, 6)
    want = truth(module, ids, x, gates, dy)
    wide = torch.zeros(6, 38, dtype=torch.float64)
    wide[:, ::2] = x.t()
    strided = wide[:, ::2].t().requires_grad_()
    loose = gates.t().contiguous().t().requires_grad_()
    y = module(strided, DispatchQueue.build(ids, 7), loose)
    gx, gg = torch.autograd.grad(y.sum(), (strided, loose))
    for got, name in ((y, "y"), (gx, "x"), (gg, "gates")):
        assert (got - want[name]).norm() < 1e-12 * want[name].norm()
    row = x[:1].expand(19, 6)
    same = module(row, DispatchQueue.build(ids, 7), gates)
    assert torch.equal(same, module(row.contiguous(), DispatchQueue.build(ids, 7), gates))


def test_weights_of_any_stride_give_the_same_numbers() -> None:
    """marin-community/marin#5328: layouts are views, transposed weights (as Hugging Face's GPT-OSS stores them) too."""
    ids = routings()["random"]
    module = experts(7, 6, 5, dtype=torch.float64)
    x, gates, dy = inputs(ids, 6, torch.float64)
    want = run(module, ids, x, gates, dy)
    for p in module.parameters():
        p.data = p.data.transpose(1, 2).contiguous().transpose(1, 2)
    got = run(module, ids, x, gates, dy)
    assert max(errors(got, want).values()) < 1e-12


def test_gates_of_any_float_dtype_keep_their_dtype_in_the_gradient() -> None:
    """shawntan/scattermoe#17, pytorch/pytorch#174763: fp32 gates with bf16 x, and bf16 gates."""
    ids = routings()["random"]
    module = experts(7, 6, 5, dtype=torch.bfloat16)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        x, gates, dy = inputs(ids, 6, torch.bfloat16)
        gates = gates.detach().to(dtype).requires_grad_()
        got = run(module, ids, x, gates, dy)
        assert got["y"].dtype == torch.bfloat16 and got["gates"].dtype == dtype
        assert errors(got, truth(module, ids, x, gates, dy))["gates"] < 1e-2


def test_autocast_computes_in_bf16_and_returns_fp32_gradients() -> None:
    """shawntan/scattermoe#17; databricks/megablocks#95; huggingface/transformers#43828."""
    ids = routings()["random"]
    module = experts(7, 6, 5)
    x, gates, _ = inputs(ids, 6, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = module(x, DispatchQueue.build(ids, 7), gates)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert x.grad is not None and gates.grad is not None
    assert x.grad.dtype == gates.grad.dtype == torch.float32
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in module.parameters())
    want = truth(module, ids, x, gates, torch.ones(19, 6))
    assert (x.grad.double() - want["x"]).norm() < 2e-2 * want["x"].norm()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"save": "half", "activation": "gelu"}, "half"),
        ({"save": "h"}, "save='h'"),
        ({"save": "auto"}, "save_budget"),
        ({"activation": "tanh"}, "tanh"),
        ({"backend": "cuda"}, "cuda"),
        ({"layout": "fused"}, "fused"),
        ({"layout": "concat", "activation": "silu"}, "no gate"),
        ({"chunk_tokens": 0}, "chunk_tokens=0"),
        ({"chunk_tokens": 2.5}, "chunk_tokens=2.5 must be a whole number"),
        ({"save": "auto", "save_budget": -1}, "save_budget=-1"),
    ],
)
def test_refused_constructor_values_are_named(options: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        FusedExpertMLP(2, 4, 4, **options)  # type: ignore[arg-type]


def test_refused_calls_are_named() -> None:
    module = FusedExpertMLP(3, 4, 4)
    ids = torch.zeros(5, 2, dtype=torch.long)
    queue = DispatchQueue.build(ids, 3)
    x, gates = torch.zeros(5, 4), torch.zeros(5, 2)
    for call, text in (
        (lambda: module(torch.zeros(5, 3), queue, gates), "must be \\[T, 4\\]"),
        (lambda: module(torch.zeros(6, 4), queue, gates), "6 tokens and the queue 5"),
        (lambda: module(x, DispatchQueue.build(ids, 4), gates), "4 experts and this module 3"),
        (lambda: module(x, queue, torch.zeros(5, 3)), "do not match"),
        (lambda: module(x, queue, ids), "floating"),
        (lambda: module(x.double(), queue, gates), "torch.float64 and the weights torch.float32"),
        (lambda: module(x.to("meta"), queue, gates), "meta"),
        (lambda: FusedExpertMLP(0, 4, 4), "num_experts=0"),
        (lambda: FusedExpertMLP(3.0, 4, 4), "num_experts=3.0"),  # type: ignore[arg-type]
        (lambda: FusedExpertMLP.from_parameters(nn.Parameter(x), nn.Parameter(x)), r"w2_EDF \(5, 4\) must be"),
        (lambda: FusedExpertMLP(3, 4, 4, backend="triton").forward_saved(x, queue, gates), "on the CPU|needs the triton package"),
    ):
        with pytest.raises(ConfigError, match=text):
            call()


def test_repr_states_what_is_kept() -> None:
    assert "save='half' (keeps x, gate half of H)" in repr(FusedExpertMLP(2, 4, 4, save="half"))


def test_from_parameters_shares_storage() -> None:
    source = experts(3, 6, 5)
    view = FusedExpertMLP.from_parameters(source.w1_EFD, source.w2_EDF, source.w3_EFD)
    assert view.w1_EFD is source.w1_EFD and view.dim == 6 and view.hidden_dim == 5
    with pytest.raises(ConfigError, match="needs w3"):
        FusedExpertMLP.from_parameters(source.w1_EFD, source.w2_EDF)
    with pytest.raises(ConfigError, match="w1_EFD is"):
        FusedExpertMLP.from_parameters(source.w2_EDF, source.w2_EDF, source.w3_EFD)


def test_one_bias_of_gate_and_up_alone_is_refused() -> None:
    E, D, F = 2, 3, 4
    w1, w2, w3 = (nn.Parameter(torch.randn(*shape)) for shape in ((E, F, D), (E, D, F), (E, F, D)))
    with pytest.raises(ConfigError, match="both a bias or none"):
        FusedExpertMLP.from_parameters(w1, w2, w3, biases=(nn.Parameter(torch.zeros(E, F)), None, None))


def test_a_gradient_of_another_dtype_is_refused() -> None:
    module = FusedExpertMLP(2, 3, 4)
    ids, gates, x = torch.tensor([[0], [1]]), torch.ones(2, 1), torch.randn(2, 3)
    y, saved = module.forward_saved(x, DispatchQueue.build(ids, 2), gates)
    with pytest.raises(ConfigError, match="convert dy"):
        module.backward_input(saved, y.double())
