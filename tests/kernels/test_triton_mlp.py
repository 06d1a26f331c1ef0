"""Promises of the Triton kernels of the expert MLP, against the fp64 oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.interpreted import DEVICE, DTYPES, TOLERANCE, interpreter, triton_backend  # noqa: F401 (autouse fixture)
from torchmoe.kernels import mlp
from torchmoe.kernels.activations import ACTIVATIONS, is_gated
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
        y, kept = mlp.forward(kernels, self.x, self.gates, index, weights, self.activation, save)
        up, dgates = mlp.backward_rows(kernels, self.dy, self.x, self.gates, index, weights, kept, self.activation, save)
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
    layer = Layer(routing(9, 2, 3), 3, 20, 24, "swiglu", torch.float16)
    want = layer.run("preact")
    for save in ("input", "half", "all"):
        got = layer.run(save)
        assert torch.equal(got[0], want[0])
        for name in want[1]:
            assert torch.equal(got[1][name], want[1][name]), (save, name)


def test_two_runs_give_the_same_bits() -> None:
    layer = Layer(routing(9, 3, 5), 5, 20, 24, "geglu", torch.float32)
    first, second = layer.run(), layer.run()
    assert torch.equal(first[0], second[0])
    assert all(torch.equal(first[1][name], second[1][name]) for name in first[1])


def test_a_token_does_not_depend_on_the_others() -> None:
    layer = Layer(routing(9, 2, 3), 3, 20, 24, "swiglu", torch.float32)
    y, grads = layer.run()
    layer.x[4:] = layer.x[4:] * 3.0 + 1.0
    layer.dy[4:] *= -2.0
    other, other_grads = layer.run()
    assert torch.equal(y[:4], other[:4])
    assert torch.equal(grads["x"][:4], other_grads["x"][:4])
    assert torch.equal(grads["gates"][:4], other_grads["gates"][:4])


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
