"""Tolerances that print the ratio."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["assert_close_rel", "relative_error"]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """||actual - expected|| / ||expected|| in fp64; the absolute norm where everything expected is 0."""
    a, b = actual.detach().double().cpu(), expected.detach().double().cpu()
    scale = float(b.norm())
    return float((a - b).norm()) / (scale if scale else 1.0)


def assert_close_rel(actual: Tensor, expected: Tensor, *, rel: float, name: str = "tensor") -> float:
    """Fail unless the relative error is at most ``rel``; returns it.

    The message has the error, the limit and their ratio, and the worst element. Zeros must be zeros: where everything expected is
    0, everything must be. NaN and infinity must stand where they are expected.

    Raises:
        AssertionError: another shape, or a larger error.
    """
    if actual.shape != expected.shape:
        raise AssertionError(f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    if not actual.numel():
        return 0.0
    a, b = actual.detach().double().cpu().flatten(), expected.detach().double().cpu().flatten()
    finite = torch.isfinite(b)
    if not torch.equal(torch.isfinite(a), finite) or not torch.equal(a[~finite].nan_to_num(), b[~finite].nan_to_num()):
        raise AssertionError(f"{name}: {int((torch.isfinite(a) != finite).sum())} elements are not finite where they should be")
    a, b = a[finite], b[finite]
    error = relative_error(a, b)
    if error > (rel if float(b.norm()) else 0.0):
        worst = int((a - b).abs().argmax())
        raise AssertionError(
            f"{name}: relative error {error:.3e} is {error / rel:.1f} times the limit {rel:.1e}; worst element {worst} of "
            f"{a.numel()}: {float(a[worst]):.9g}, expected {float(b[worst]):.9g}"
        )
    return error
