"""Hugging Face transformers: torchmoe as an experts implementation.

::

    from torchmoe.integrations.transformers import register

    register()
    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="torchmoe")
    # or, on a model that exists: model.set_experts_implementation("torchmoe")

Weights stay where they are: concatenated, interleaved and transposed layouts are read through views.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchmoe.dispatch import DispatchQueue
from torchmoe.errors import ConfigError
from torchmoe.kernels import activations, ops, scheme

__all__ = ["experts_forward", "register"]

_BY_HIDDEN_ACT = {"silu": ("swiglu", "silu"), "swish": ("swiglu", "silu"), "gelu": ("geglu", "gelu"), "relu2": (None, "relu2")}


def register(name: str = "torchmoe") -> None:
    """Make ``experts_implementation=name`` known to transformers (5.0 or newer). Calling it again changes nothing.

    Raises:
        ConfigError: transformers is not installed, or older.
    """
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError as e:
        raise ConfigError(f"the drop-in needs transformers 5.0 or newer ({e}); pip install 'transformers>=5'") from None

    ALL_EXPERTS_FUNCTIONS.register(name, experts_forward)


def experts_forward(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The forward of an experts module of transformers: y [T, D].

    Args:
        self: a module under ``use_experts_implementation`` (attributes gate_up_proj or up_proj, down_proj, and its flags).
        hidden_states: [T, D].
        top_k_index: [T, K]; an id of num_experts (a slot of another rank) counts as dropped.
        top_k_weights: gates [T, K].

    Raises:
        ConfigError: the module has something that the kernels do not compute.
    """
    m: Any = self
    activation = _activation(m)
    gated = activations.is_gated(activation)
    up = m.gate_up_proj if gated else m.up_proj
    up_bias = (m.gate_up_proj_bias if gated else m.up_proj_bias) if m.has_bias else None
    down, down_bias = m.down_proj, m.down_proj_bias if m.has_bias else None
    if m.is_transposed:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    weights = scheme.Weights(up, None, down, up_bias, None, down_bias)
    layout = ("concat" if m.is_concatenated else "interleaved") if gated else "split"
    queue = DispatchQueue.build(top_k_index, up.size(0))
    tracked = (hidden_states, top_k_weights, *weights)
    grad = torch.is_grad_enabled() and any(t.requires_grad for t in tracked if t is not None)
    return ops.expert_mlp(
        hidden_states,
        top_k_weights,
        queue.index,
        None,
        weights,
        activation=activation,
        layout=layout,
        save="preact" if grad else "none",
    )


def _activation(m: Any) -> str:
    name = type(m).__name__
    if m.has_post_expert_norm:
        raise ConfigError(
            f"{name} normalises each expert's output, which torchmoe does not fuse; use experts_implementation='eager'"
        )
    alpha, limit = getattr(m, "alpha", None), getattr(m, "limit", None)
    if alpha is not None or limit is not None:
        if (alpha, limit) != (activations.CLAMP_ALPHA, activations.CLAMP_LIMIT):
            raise ConfigError(
                f"{name} clamps with alpha={alpha}, limit={limit}; torchmoe computes {activations.CLAMP_ALPHA} and "
                f"{activations.CLAMP_LIMIT} only, use experts_implementation='eager'"
            )
        return "clamped_swiglu"
    hidden_act = getattr(m.config, "hidden_act", None) or getattr(m.config, "hidden_activation", None)
    own_gate = m.has_gate and type(m)._apply_gate.__module__ != "transformers.integrations.moe"
    pair = _BY_HIDDEN_ACT.get(str(hidden_act))
    found = None if pair is None or own_gate else pair[0 if m.has_gate else 1]
    if found is None:
        raise ConfigError(
            f"{name} computes {'a gate of its own' if own_gate else repr(hidden_act)}, which torchmoe has no kernel for; "
            "use experts_implementation='eager'"
        )
    return found
