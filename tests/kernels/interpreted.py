"""The Triton backend as the tests run it: on a GPU where there is one, else under Triton's interpreter (fp32 and fp16).

Triton decides between compiler and interpreter when a decorated function is defined, its own library's included. The
interpreted backend is therefore imported together with a fresh copy of Triton's Python modules, and both stand in
``sys.modules`` only while a test of these files runs: others never meet interpreted kernels, whatever runs first.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE.type == "cuda" else [])]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
KERNELS = tuple(
    f"torchmoe.kernels.{name}"
    for name in (
        "backward_hidden",
        "combine",
        "down_projection",
        "epilogues",
        "input_grad",
        "queue",
        "tiles",
        "triton_backend",
        "triton_routing",
        "up_projection",
        "weight_grad",
    )
)


def _fresh(name: str) -> bool:
    """Whether a module is imported again: Triton's Python files and the kernels, not Triton's compiled library."""
    return name in KERNELS or name == "triton" or (name.startswith("triton.") and not name.startswith("triton._C"))


def _take(found: Callable[[str], bool]) -> dict[str, ModuleType]:
    return {name: sys.modules.pop(name) for name in list(sys.modules) if found(name)}


@contextlib.contextmanager
def _in_place(modules: dict[str, ModuleType]) -> Iterator[None]:
    before, setting = _take(_fresh), os.environ.get("TRITON_INTERPRET")
    sys.modules.update(modules)
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        yield
    finally:
        modules.update(_take(_fresh))
        sys.modules.update(before)
        os.environ.pop("TRITON_INTERPRET")
        if setting is not None:
            os.environ["TRITON_INTERPRET"] = setting


@functools.cache
def _interpreted() -> dict[str, ModuleType]:
    modules: dict[str, ModuleType] = {}
    with _in_place(modules):
        importlib.import_module("torchmoe.kernels.triton_backend")
    return modules


@pytest.fixture(autouse=True)
def interpreter() -> Iterator[None]:
    """Puts the interpreted modules in place for one test (Triton imports some of its own only when a kernel runs)."""
    pytest.importorskip("triton", reason="the Triton kernels need the triton package: pip install 'torchmoe[triton]'")
    if DEVICE.type == "cuda":
        yield
        return
    pytest.importorskip("numpy", reason="Triton's interpreter needs numpy: pip install 'torchmoe[triton]'")
    with _in_place(_interpreted()):
        yield


def triton_backend() -> Any:
    """The backend's module, as the fixture of the running test has put it in place."""
    return importlib.import_module("torchmoe.kernels.triton_backend")
