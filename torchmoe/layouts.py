"""Gate and up projections: apart (w1, w3), or joint in one tensor (concatenated or interleaved). Views where strides allow."""

from __future__ import annotations

import torch
from torch import Tensor

from torchmoe.errors import ConfigError

__all__ = ["join", "split"]


def split(joint: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """(gate, up) views of a joint weight [E, 2F, D] or bias [E, 2F]; nothing is copied.

    ``concat`` has the F gate rows first (Hugging Face's gate_up_proj), ``interleaved`` has gate and up rows in turn (GPT-OSS).
    Transposed weights [E, D, 2F] are read as ``split(w.transpose(1, 2), layout)``.
    """
    rows = joint.size(1)
    if rows % 2:
        raise ConfigError(f"a joint weight has an even number of rows, this one is {tuple(joint.shape)}; check its layout")
    if layout == "concat":
        return joint[:, : rows // 2], joint[:, rows // 2 :]
    if layout == "interleaved":
        return joint[:, 0::2], joint[:, 1::2]
    raise ConfigError(f"layout={layout!r} is not a joint one; use 'concat' or 'interleaved'")


def join(gate: Tensor, up: Tensor, layout: str) -> Tensor:
    """The joint tensor of (gate, up): the one they are views of, if they are the halves of one, else a copy."""
    if gate.shape != up.shape:
        raise ConfigError(f"gate {tuple(gate.shape)} and up {tuple(up.shape)} differ; both are [E, F, D], or [E, F]")
    if layout not in ("concat", "interleaved"):
        raise ConfigError(f"layout={layout!r} is not a joint one; use 'concat' or 'interleaved'")
    step, F = gate.stride(1), gate.size(1)
    apart = (up.storage_offset() - gate.storage_offset()) if _one_storage(gate, up) else None
    shape = (gate.size(0), 2 * F, *gate.shape[2:])
    if apart is not None and apart > 0:
        if layout == "concat" and apart == F * step:
            return gate.as_strided(shape, gate.stride())
        if layout == "interleaved" and 2 * apart == step:
            return gate.as_strided(shape, (gate.stride(0), apart, *gate.stride()[2:]))
    return torch.cat((gate, up), 1) if layout == "concat" else torch.stack((gate, up), 2).reshape(shape)


def _one_storage(a: Tensor, b: Tensor) -> bool:
    return a.stride() == b.stride() and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() and a.dtype == b.dtype
