"""How the Triton backend launches: checks before, the configuration, the device, the grid bound.

This is the one place where a kernel starts, so the compile gate and the tests can put a recorder in its stead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchmoe.errors import ConfigError
from torchmoe.kernels.tuning import Config, Key, tuner

__all__ = [
    "DTYPES",
    "check",
    "dot_precision",
    "index_64",
    "launch",
    "power_of_two",
    "row_tiles",
    "run_gemm",
    "split_rows",
    "split_slices",
    "strides",
]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INT32_MAX = 2**31 - 1
SIMULATED_SMS = 132
"""Multiprocessors assumed where there is no GPU (interpreter, compile gate): those of an H100."""


def launch(kernel: Any, grid: tuple[int, ...], device: torch.device, **arguments: Any) -> None:
    """Start one kernel on the device of its tensors. A grid without programs starts nothing."""
    if 0 in grid:
        return
    guard = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with guard:
        # Said explicitly because Triton 3.10 changes the default.
        kernel[grid](**{"enable_fp_fusion": True, **arguments})


def run_gemm(
    key: Key, device: torch.device, start: Callable[[Config], None], rehearse: Callable[[Config], None] | None = None
) -> None:
    """Run a grouped GEMM with the configuration of its key; ``rehearse`` replaces ``start`` while measuring candidates."""
    start(tuner().config(key, device, rehearse or start))


def row_tiles(rows: int, num_experts: int, block_m: int) -> int:
    """Most row tiles that any routing of ``rows`` rows to E experts can need: the grid, without asking the device."""
    if rows <= num_experts:
        return rows
    # Worst case: E - 1 experts have one row each and waste a tile on it, the last has the rest.
    return -(-(rows - num_experts + 1) // block_m) + num_experts - 1


def split_slices(rows: int, slice_rows: int) -> tuple[int, int]:
    """(experts, slices) at most that are longer than ``slice_rows``, for any routing of ``rows`` rows."""
    experts = rows // (slice_rows + 1)
    return experts, (rows - experts) // slice_rows + experts if experts else 0


def split_rows(rows: int, tiles: int, device: torch.device) -> int:
    """Rows after which a weight gradient's reduction is cut into slices, from sizes that the host knows.

    With every row in one expert, its ``tiles`` output tiles would be the only programs. Half of an even share per
    multiprocessor bounds the longest program; the partial sums then stay under about 4 tiles per multiprocessor.
    """
    sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else SIMULATED_SMS
    share = -(-rows * tiles // (2 * sms))
    return max(1024, -(-share // 256) * 256)


def index_64(*views: tuple[Tensor, tuple[int, ...]]) -> bool:
    """Whether an offset over the given dimensions of any view can pass 2^31 - 1."""
    return any(sum(max(view.size(d) - 1, 0) * abs(view.stride(d)) for d in dims) > INT32_MAX for view, dims in views)


def dot_precision(dtype: torch.dtype) -> str:
    """fp32 products are exact unless torch.set_float32_matmul_precision allows TF32; other dtypes ignore it."""
    return "tf32" if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest" else "ieee"


def check(name: str, device: torch.device, dtype: torch.dtype, **tensors: Tensor | None) -> None:
    """Refuse what the kernels cannot compute, before anything is launched.

    Raises:
        ConfigError: dtype without a kernel, a tensor of another dtype or on another device.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"{name}: dtype {dtype} has no Triton kernel; use float32, bfloat16 or float16, or backend='reference'")
    for label, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.device != device:
            raise ConfigError(f"{name}: {label} is on {tensor.device}, the rows are on {device}; move it there")
        if tensor.dtype != dtype:
            raise ConfigError(f"{name}: {label} is {tensor.dtype}, the rows are {dtype}; cast it (autocast does)")


def strides(name: str, tensor: Tensor, letters: str) -> dict[str, int]:
    """Strides as kernel arguments: stride_<name><letter>."""
    return {f"stride_{name}{letter}": stride for letter, stride in zip(letters, tensor.stride(), strict=True)}


def power_of_two(value: int) -> int:
    """The smallest power of two >= value (1 for 0)."""
    return 1 << max(value - 1, 0).bit_length()
