"""Activation checkpointing that saves routing decisions instead of taking them again.

Recomputation may see logits that differ in the last bit, and near-ties then go to other experts. Shapes in torchmoe never depend
on the routing, so plain ``torch.utils.checkpoint`` raises no error; but the backward would follow other experts than the
forward. Under :func:`save_routing` every top-k is saved (8 + 4 or 8 bytes a slot) and everything else is recomputed::

    y, routing = checkpoint(layer, x, use_reentrant=False, context_fn=save_routing)
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

__all__ = ["routing_policy", "save_routing"]


def routing_policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Save what decides a routing (top-k), recompute the rest. Compose it with a policy of your own by calling it first."""
    if op == torch.ops.aten.topk.default:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def save_routing() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The ``context_fn`` of ``torch.utils.checkpoint.checkpoint`` under which routing is decided once."""
    contexts: tuple[AbstractContextManager[Any], AbstractContextManager[Any]] = create_selective_checkpoint_contexts(  # type: ignore[no-untyped-call]
        routing_policy
    )
    return contexts
