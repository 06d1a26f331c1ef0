"""Which implementation of the kernels runs. A backend is a module with the functions of :mod:`torchmoe.kernels.reference`."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from types import ModuleType

import torch

from torchmoe.errors import ConfigError

__all__ = ["BACKENDS", "choose", "resolve"]

BACKENDS = ("auto", "reference", "triton")


@functools.cache
def _load(name: str) -> ModuleType:
    return importlib.import_module({"reference": "torchmoe.kernels.reference", "triton": "torchmoe.kernels.triton_backend"}[name])


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def choose(backend: str, device: torch.device) -> str:
    """The backend's name: ``auto`` is Triton on a GPU (CUDA or ROCm) where installed, else the reference.

    Raises:
        ConfigError: unknown name, or ``triton`` asked for where it is not installed.
    """
    if backend not in BACKENDS:
        raise ConfigError(f"backend {backend!r} is unknown; use one of {', '.join(BACKENDS)}")
    if backend == "auto":
        return "triton" if device.type == "cuda" and _has_triton() else "reference"
    if backend == "triton" and not _has_triton():
        raise ConfigError("backend 'triton' needs the triton package; pip install 'torchmoe[triton]' or use backend='reference'")
    return backend


def resolve(backend: str, device: torch.device) -> ModuleType:
    """The module that computes on ``device``.

    Raises:
        ConfigError: see :func:`choose`; or Triton is asked for tensors on a CPU, outside its interpreter.
    """
    name = choose(backend, device)
    if name == "triton" and device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError(
            "backend 'triton' computes on a GPU and these tensors are on the CPU; use backend='auto' or 'reference'"
        )
    return _load(name)
