"""Promises of the Triton kernels of the expert MLP, against the fp64 oracle."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.interpreted import DEVICE, DTYPES, TOLERANCE, interpreter, triton_backend  # noqa: F401 (autouse fixture)
from torchmoe.kernels import launch as host
from torchmoe.kernels import mlp, reference
from torchmoe.kernels.activations import ACTIVATIONS, is_gated
from torchmoe.kernels.tuning import KERNELS, Config, Key, candidates
from torchmoe.testing.oracle import expert_mlp_grads, relative_error


class Layer:
    """One random layer: weights, tokens, routing, and the gradients that the kernels and the oracle give."""

    def __init__(self, ids: Tensor, E: int, D: int, F: int, activation: str, dtype: torch.dtype, *, bias: bool = False) -> None:
        generator = torch.Generator().manual_seed(ids.numel() + D)

        def random(*sizes: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*sizes, generator=generator) * scale).to(dtype).to(DEVICE)

        T, K = ids.shape
        self.ids, self.E, self.activation = ids.to(DEVICE), E, activation
        self.x, self.dy = random(T, D), random(T, D)
        self.gates = torch.rand(T, K, generator=generator).to(DEVICE)
        self.weights = {"w1": random(E, F, D, scale=0.3), "w2": random(E, D, F, scale=0.3)}
        if is_gated(activation):
            self.weights["w3"] = random(E, F, D, scale=0.3)
        if bias:
            self.weights |= {"b1": random(E, F), "b2": random(E, D)}
            if is_gated(activation):
                self.weights["b3"] = random(E, F)

    def oracle(self) -> tuple[Tensor, dict[str, Tensor]]:
        return expert_mlp_grads(self.x.cpu(), self.ids, self.gates, self.weights_cpu(), self.dy, activation=self.activation)

    def weights_cpu(self) -> dict[str, Tensor]:
        return {name: tensor.cpu() for name, tensor in self.weights.items()}

    def run(self, save: str = "preact", max_rows: int | None = None, **changed: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """y and all gradients from the kernels; the weights' accumulated into buffers that hold 1."""
        kernels = triton_backend()
        weights = mlp.Weights(**{"w3": None, **self.weights, **changed})  # type: ignore[arg-type]
        tokens, offsets, index_map, _ = kernels.build_queue(self.ids, self.E, max_rows)
        index = mlp.Index(tokens, offsets, index_map)
        problem = mlp.Problem(index, weights, self.activation, save)
        y, kept = mlp.forward(kernels, self.x, self.gates, problem)
        up, dgates = mlp.backward_rows(kernels, self.dy, self.x, self.gates, problem, kept)
        grads = {"x": mlp.input_gradient(kernels, up, index, weights), "gates": dgates}
        for name in self.weights:
            out = torch.ones(self.weights[name].shape, device=DEVICE)
            mlp.weight_gradient(kernels, name, up, self.x, self.dy, index, out, True)
            grads[name] = out - 1.0
        return y, grads

    def check(self, dtype: torch.dtype, **options: Any) -> None:
        got, want = self.run(**options), self.oracle()
        errors = {"y": relative_error(got[0], want[0])}
        errors |= {name: relative_error(got[1][name], want[1][name]) for name in want[1]}
        assert max(errors.values()) < TOLERANCE[dtype], errors


def routing(T: int, K: int, E: int, drop: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(T * 31 + K)
    ids = torch.rand(T, E, generator=generator).argsort(1)[:, :K]
    return torch.where(torch.rand(T, K, generator=generator) < drop, -1, ids)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_output_and_every_gradient_equal_the_oracle(activation: str, dtype: torch.dtype) -> None:
    Layer(routing(11, 2, 3, drop=0.2), 3, 20, 24, activation, dtype).check(dtype)


@pytest.mark.parametrize("activation", ["clamped_swiglu", "gelu"])
def test_biases_and_their_gradients(activation: str) -> None:
    """With a bias behind the gate, the gate gradient has the term <dO, b2>."""
    layer = Layer(routing(11, 2, 3), 3, 17, 19, activation, torch.float32, bias=True)
    if activation == "clamped_swiglu":  # reach both clamps
        layer.weights["b1"].mul_(6.0)
        layer.weights["b3"].mul_(6.0)
    layer.check(torch.float32)


ROUTINGS = {
    "one token": torch.tensor([[1, 2]]),
    "all to one": torch.full((9, 1), 2),
    "first and last empty": torch.tensor([[1, 2], [2, 1], [1, 2]]),
    "sentinels": torch.tensor([[0, -1], [-1, -1], [3, 2]]),
    "same expert twice": torch.tensor([[2, 2], [2, 3]]),
    "every expert": torch.arange(4)[None],
}


@pytest.mark.parametrize("name", ROUTINGS)
def test_ugly_routings(name: str) -> None:
    Layer(ROUTINGS[name], 4, 6, 5, "swiglu", torch.float32).check(torch.float32)


def test_no_tokens() -> None:
    y, grads = Layer(torch.zeros(0, 2, dtype=torch.long), 3, 6, 5, "swiglu", torch.float32).run()
    assert y.shape == (0, 6)
    assert grads["x"].shape == (0, 6)
    assert all(not grads[name].any() for name in ("w1", "w2", "w3"))


@pytest.mark.parametrize(("D", "F"), [(1, 1), (97, 47), (64, 32), (130, 16)])
def test_any_width(D: int, F: int) -> None:
    """https://github.com/pytorch/torchtitan/issues/1651: strides that are no multiple of 16 bytes."""
    Layer(routing(7, 2, 3), 3, D, F, "swiglu", torch.float32).check(torch.float32)


def test_max_rows_leave_tail_rows_alone() -> None:
    Layer(routing(7, 2, 3, drop=0.5), 3, 8, 8, "swiglu", torch.float32).check(torch.float32, max_rows=20)


def test_all_save_modes_give_the_same_bits() -> None:
    layer = Layer(routing(5, 2, 3), 3, 20, 24, "swiglu", torch.float16)
    want = layer.run("preact")
    for save in ("input", "half", "all"):
        got = layer.run(save)
        assert torch.equal(got[0], want[0])
        for name in want[1]:
            assert torch.equal(got[1][name], want[1][name]), (save, name)


def test_two_runs_give_the_same_bits() -> None:
    layer = Layer(routing(5, 2, 3), 3, 20, 24, "geglu", torch.float32)
    first, second = layer.run(), layer.run()
    assert torch.equal(first[0], second[0])
    assert all(torch.equal(first[1][name], second[1][name]) for name in first[1])


def test_nan_rows_stay_in_their_rows() -> None:
    """A token that is dropped everywhere may hold NaN in x, dO and gates; a routed NaN reaches its own row alone."""
    ids = torch.tensor([[0, 1], [-1, -1], [2, 1], [1, 0]])
    layer = Layer(ids, 3, 8, 8, "swiglu", torch.float32)
    layer.x[1] = layer.dy[1] = layer.gates[1] = float("nan")
    y, grads = layer.run()
    assert all(tensor.isfinite().all() for tensor in (y, *grads.values()))
    assert not y[1].any()
    assert not grads["x"][1].any()
    layer.x[0] = float("nan")
    y, grads = layer.run()
    assert y[0].isnan().all()
    assert y[1:].isfinite().all()
    assert grads["x"][1:].isfinite().all()


def test_weights_of_any_strides_without_a_copy() -> None:
    """GPT-OSS keeps gate and up rows in turn; other layouts are transposed."""
    layer = Layer(routing(7, 2, 3), 3, 20, 24, "clamped_swiglu", torch.float32)
    want = layer.run()
    w1, w3, w2 = (layer.weights[name] for name in ("w1", "w3", "w2"))
    both = torch.stack((w1, w3), 2).reshape(3, 48, 20)
    transposed = both.mT.contiguous().mT
    got = layer.run(w1=transposed[:, 0::2], w3=transposed[:, 1::2], w2=w2.mT.contiguous().mT)
    assert torch.equal(got[0], want[0])
    assert all(torch.equal(got[1][name], want[1][name]) for name in want[1])


def test_rows_of_any_strides() -> None:
    layer = Layer(routing(7, 2, 3), 3, 20, 24, "swiglu", torch.float32)
    want = layer.run()
    layer.x, layer.dy = layer.x.t().contiguous().t(), torch.stack((layer.dy, layer.dy), 2)[:, :, 1]
    got = layer.run()
    assert torch.equal(got[0], want[0])
    assert all(torch.equal(got[1][name], want[1][name]) for name in want[1])
    layer.dy = torch.ones(1, 1, device=DEVICE).expand(7, 20)
    layer.check(torch.float32)


def _shipped() -> list[tuple[str, Config]]:
    """Every configuration of every table, with the kernels that it is for."""
    found = {}
    for architecture in ("sm_90", "gfx942", "default"):
        for kernel, width, itemsize, bucket in product(KERNELS, (16, 1), (2, 4), (0, 6, 12)):
            for config in candidates(Key(kernel, width, 16, 1, itemsize, bucket), architecture):
                found[kernel, replace(config, group_m=2, num_warps=4, num_stages=2)] = None
    return list(found)


@pytest.mark.parametrize(("kernel", "config"), _shipped(), ids=lambda value: value if isinstance(value, str) else None)
def test_every_shipped_tile_computes_what_the_reference_does(
    kernel: str, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles of another size than the tests' own once hid a wrong kernel (https://github.com/ROCm/aiter/pull/4398), and one tile's
    dx was wrong by half where two products met in one accumulator (release notes of linkedin/Liger-Kernel 0.8.5)."""
    monkeypatch.setattr(host, "run_gemm", lambda key, device, start, rehearse=None: start(config))
    kernels, E, D, F = triton_backend(), 2, 40, 72
    layer = Layer(routing(9, 1, 2), E, D, F, "swiglu", torch.float16)
    w1, w3, w2 = (layer.weights[name] for name in ("w1", "w3", "w2"))
    tokens, offsets, _, _ = kernels.build_queue(layer.ids, E)
    a, gates = layer.dy.new_ones(9, F), layer.gates.reshape(-1)
    h = a, 2.0 * a

    def flat(a: Tensor, halves: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        return a, *halves

    def hidden(to: Any) -> tuple[Tensor, ...]:
        dh, ag, dgates = to.backward_hidden(layer.dy, tokens, offsets, gates, h, w2, None, "swiglu")
        return *dh, ag, dgates

    calls = {
        "up_projection": lambda to: flat(*to.up_projection(layer.x, tokens, offsets, w1, w3, None, None, "swiglu", True)),
        "down_projection": lambda to: (to.down_projection(a, offsets, w2, None),),
        "backward_hidden": hidden,
        "input_grad": lambda to: (to.input_grad(h, offsets, w1, w3),),
        "weight_grad": lambda to: (to.weight_grad_rows(a, layer.x, None, tokens, offsets, torch.ones(E, F, D, device=DEVICE)),),
    }
    for got, want in zip(calls[kernel](kernels), calls[kernel](reference), strict=True):
        assert relative_error(got, want) < TOLERANCE[torch.float16]


@pytest.mark.parametrize("slice_rows", [1, 3, 8])
def test_split_reductions_give_the_weight_gradient(slice_rows: int) -> None:
    """Experts longer than a slice go through ordered partial sums; the others, and those without rows, do not."""
    kernels, E = triton_backend(), 5
    ids = torch.tensor([3] * 13 + [1] * 2 + [0] * 4)[:, None]
    tokens, offsets, _, _ = kernels.build_queue(ids.to(DEVICE), E)
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(19, n, generator=generator).to(DEVICE) for n in (20, 33))
    for accumulate in (True, False):
        start = torch.full((E, 20, 33), 1.0 if accumulate else float("nan"), device=DEVICE)
        got = kernels.weight_grad_rows(left, right, tokens, None, offsets, start.clone(), accumulate, slice_rows=slice_rows)
        want = reference.weight_grad_rows(left, right, tokens, None, offsets, start.clone(), accumulate)
        assert relative_error(got, want) < 1e-6
        again = kernels.weight_grad_rows(left, right, tokens, None, offsets, start.clone(), accumulate, slice_rows=slice_rows)
        assert torch.equal(got, again)
        assert torch.equal(got[[2, 4]], torch.full_like(got[[2, 4]], 1.0 if accumulate else 0.0))


def test_gradients_into_strided_half_precision_buffers() -> None:
    kernels, E = triton_backend(), 3
    tokens, offsets, _, _ = kernels.build_queue(routing(7, 1, 3).to(DEVICE), E)
    left, right = torch.randn(7, 6, device=DEVICE).half(), torch.randn(7, 10, device=DEVICE).half()
    out = torch.ones(E, 12, 10, device=DEVICE, dtype=torch.float16)
    kernels.weight_grad_rows(left, right, tokens, None, offsets, out[:, 0::2])
    want = reference.weight_grad_rows(left, right, tokens, None, offsets, torch.ones(E, 6, 10, device=DEVICE))
    assert relative_error(out[:, 0::2], want) < 1e-3
    assert torch.equal(out[:, 1::2], torch.ones_like(out[:, 1::2]))


def test_ragged_combine_sums_a_token_s_own_slots() -> None:
    """Expert choice: a token has any number of slots, none included."""
    rows = torch.randn(6, 10, device=DEVICE)
    index_map = torch.tensor([4, -1, 0, 5, 2], dtype=torch.int32, device=DEVICE)
    gates = torch.rand(5, device=DEVICE)
    starts = torch.tensor([0, 0, 3, 3, 5], dtype=torch.int32, device=DEVICE)
    got = triton_backend().combine(rows, index_map, gates, starts)
    want = torch.zeros(4, 10, device=DEVICE)
    want[1] = gates[0] * rows[4] + gates[2] * rows[0]
    want[3] = gates[3] * rows[5] + gates[4] * rows[2]
    assert relative_error(got, want) < 1e-6


def test_sixteen_equal_rows_are_summed_exactly() -> None:
    """https://github.com/NVIDIA/TransformerEngine/issues/1336: one rounding, at the end."""
    rows = torch.ones(16, 8, device=DEVICE, dtype=torch.float16) + 2**-9
    index_map = torch.arange(16, dtype=torch.int32, device=DEVICE)[None]
    assert torch.equal(triton_backend().combine(rows, index_map, None), (rows[:1].float() * 16).half())


def test_offsets_past_31_bits() -> None:
    """https://github.com/linkedin/Liger-Kernel/issues/1246 and 1296: token and expert strides beyond 2^31 elements."""
    try:
        storage = torch.empty(2**31 + 2**20, dtype=torch.float16, device=DEVICE)
    except (RuntimeError, MemoryError) as error:
        pytest.skip(f"needs 4.3 GB of address space: {error}")
    layer = Layer(torch.tensor([[1], [0]]), 2, 16, 16, "silu", torch.float16)
    want = layer.run()
    far = storage.as_strided((2, 16), (2**31 + 64, 1))
    near, layer.x = layer.x, far.copy_(layer.x)
    got = layer.run()
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1]["w1"], want[1]["w1"])
    layer.x, far = near, storage.as_strided((2, 16, 16), (2**31 + 64, 16, 1))
    got = layer.run(w1=far.copy_(layer.weights["w1"]))
    assert torch.equal(got[1]["x"], want[1]["x"])
