"""What each rank of the dispatcher test does; no pytest here, because processes import it."""

from __future__ import annotations

import torch
from torch import Tensor

from torchmoe.testing.ranks import RankContext
from torchmoe.titan.shims import ensure

NAMES = ("torchtitan", "all_to_all", "hierarchical")


def dispatch_and_combine(ctx: RankContext, num_experts: int, top_k: int) -> dict[str, tuple[Tensor, ...]]:
    """Rows, counts, results and gradients of torchtitan's dispatcher and of both overrides of it."""
    ensure()
    from torch.distributed.device_mesh import init_device_mesh
    from torchtitan.config import OverrideConfig
    from torchtitan.config.override import apply_overrides
    from torchtitan.distributed.utils import set_spmd_backend
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

    from torchmoe.titan.dispatcher import ExchangeTokenDispatcher

    set_spmd_backend("partial_dtensor")
    mesh = init_device_mesh("cpu", (ctx.world,), mesh_dim_names=("ep",))
    imports = {
        "torchtitan": [],
        "all_to_all": ["torchmoe.titan.dispatcher.all_to_all"],
        "hierarchical": [("torchmoe.titan.dispatcher.hierarchical", {"lanes": 2})],
    }
    out: dict[str, tuple[Tensor, ...]] = {}
    for name in NAMES:
        config = Holder.Config(dispatcher=AllToAllTokenDispatcher.Config(num_experts=num_experts, top_k=top_k))
        apply_overrides(OverrideConfig(imports=imports[name]), config)
        dispatcher = config.dispatcher.build()
        assert isinstance(dispatcher, ExchangeTokenDispatcher) is (name != "torchtitan")
        dispatcher.wire_meshes(ep_mesh=mesh)
        g = torch.Generator().manual_seed(ctx.rank)
        x = torch.randn(9, 4, generator=g).requires_grad_()
        # rank 0 sends everything to the first experts; nobody sends to the last
        ids = torch.stack([torch.randperm(num_experts - 1 if ctx.rank else top_k, generator=g)[:top_k] for _ in range(9)])
        scores = torch.rand(9, top_k, generator=g).requires_grad_()
        counts = torch.bincount(ids.view(-1), minlength=num_experts)
        rows, per_expert, metadata = dispatcher.dispatch(x, scores, ids, counts)
        y = dispatcher.combine(rows * 3.0 + 1.0, metadata, x)
        grads = torch.autograd.grad(y, [x, scores], torch.randn(9, 4, generator=g))
        out[name] = tuple(t.detach().clone() for t in (rows, per_expert, y, *grads))
    return out


def _holder() -> type:
    ensure()
    from dataclasses import dataclass

    from torchtitan.config import Configurable
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

    class Holder(Configurable):
        @dataclass(kw_only=True, slots=True)
        class Config(Configurable.Config):
            dispatcher: AllToAllTokenDispatcher.Config

    return Holder


Holder = _holder()
