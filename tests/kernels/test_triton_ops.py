"""The registered operators with ``backend="triton"``: the whole module through the kernels, under the interpreter or on a GPU."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.experts_kit import errors, experts, inputs, truth
from tests.kernels.interpreted import DEVICE, TOLERANCE, interpreter, triton_backend  # noqa: F401 (autouse fixture)
from torchmoe.dispatch import DispatchQueue
from torchmoe.experts import FusedExpertMLP
from torchmoe.kernels import backends, launch
from torchmoe.kernels.tuning import Config

IDS = torch.tensor([[0, 2], [1, -1], [2, 0], [1, 2], [3, 1]])


@pytest.fixture(autouse=True)
def loaded(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811 (after the imported fixture)
    """``resolve`` gives the module that the fixture has put in place, not one that an earlier test loaded."""
    found = {"triton": triton_backend(), "reference": backends.resolve("reference", DEVICE)}
    monkeypatch.setattr(backends, "_load", found.__getitem__)


def run(module: FusedExpertMLP, ids: Tensor, x: Tensor, gates: Tensor, dy: Tensor) -> dict[str, Tensor]:
    queue = DispatchQueue.build(ids.to(DEVICE), module.num_experts, backend="triton")
    y = module(x, queue, gates)
    found = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    grads = torch.autograd.grad(y, (x, gates, *(p for _, p in found)), dy)
    return dict(zip(["y", "x", "gates", *(n.split("_")[0] for n, _ in found)], [y.detach(), *grads], strict=True))


@pytest.mark.parametrize(("save", "chunk"), [("input", None), ("half", None), ("preact", None), ("all", None), ("preact", 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_autograd_through_the_kernels_equals_the_oracle(save: str, chunk: int | None, dtype: torch.dtype) -> None:
    """triton-lang/triton#2339: the backend is an argument; the module, the operator and its autograd rule are the same."""
    module = experts(4, 6, 8, bias=True, save=save, chunk_tokens=chunk, backend="triton", dtype=dtype).to(DEVICE)
    x, gates, dy = (t.detach().to(DEVICE) for t in inputs(IDS, 6, dtype))
    got = run(module, IDS, x.requires_grad_(), gates.requires_grad_(), dy)
    worst = errors({n: t.cpu() for n, t in got.items()}, truth(module, IDS, x, gates, dy))
    assert max(worst.values()) < TOLERANCE[dtype], worst


def test_operators_pass_opcheck_with_triton() -> None:
    module = experts(4, 6, 8, bias=True, backend="triton").to(DEVICE)
    x, gates, dy = (t.detach().to(DEVICE) for t in inputs(IDS, 6, torch.float32))
    queue = DispatchQueue.build(IDS.to(DEVICE), 4, backend="triton")
    torch.library.opcheck(torch.ops.torchmoe.build_queue.default, (IDS.to(DEVICE), 4, None, "triton"))
    weights = [None if w is None else w.detach() for w in module.weights()]
    arguments: tuple[Any, ...] = (x, gates, *queue.index, None, *weights, "swiglu", "split", "preact", 0, "triton")
    # The interpreter reads values, which fake tensors and traced ones do not have: only the schema and the fake rule are checked.
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.torchmoe.expert_mlp.default, arguments, test_utils=tests)
    _, gate, up, _ = torch.ops.torchmoe.expert_mlp.default(*arguments)
    backward = (dy, *arguments[:13], gate, up, None, [True] * 8, *arguments[13:])
    torch.library.opcheck(torch.ops.torchmoe.expert_mlp_backward.default, backward, test_utils=tests[:1] + tests[2:])


def test_a_tokens_result_does_not_depend_on_the_other_tokens_for_one_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytorch/torchtitan#2775, #1720; mlc-ai/pith-train PR#5: with the same tiles a token's y, dx and gate gradients have the
    same bits in any batch, at any row of a tile."""
    monkeypatch.setattr(launch, "run_gemm", lambda key, device, start, rehearse=None: start(Config(16, 16, 16, 8, 2, 2)))
    module = experts(4, 24, 40, backend="triton").to(DEVICE)
    ids = torch.stack([torch.randperm(4, generator=torch.Generator().manual_seed(s))[:2] for s in range(40)])
    x, gates, dy = (t.detach().to(DEVICE) for t in inputs(ids, 24, torch.float32))
    whole = run(module, ids, x.requires_grad_(), gates.requires_grad_(), dy)
    for first, last in itertools.pairwise((0, 3, 21, 22, 40)):
        part = (t[first:last].detach() for t in (x, gates))
        some = run(module, ids[first:last], *(t.requires_grad_() for t in part), dy[first:last])
        for name in ("y", "x", "gates"):
            assert torch.equal(some[name], whole[name][first:last]), name
