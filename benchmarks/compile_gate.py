"""Compile every Triton kernel for a named GPU on a machine without one, and read the machine code.

The host functions of the backend run on meta tensors of a model's real shapes; a recorder stands where the launch would be.
What is compiled is therefore what a GPU would be handed: the same specialisation of integers, the same constants.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.shapes import ExpertShape
from torchmoe.kernels import launch as host
from torchmoe.kernels import triton_backend as backend
from torchmoe.kernels.tuning import Config, default_config

__all__ = ["SHARED_LIMIT", "TARGETS", "Launch", "Report", "compile_launch", "count_nvidia", "launches", "specialise"]

TARGETS = {"sm_80": ("cuda", 80, 32), "sm_90": ("cuda", 90, 32), "sm_100": ("cuda", 100, 32), "gfx942": ("hip", "gfx942", 64)}
SHARED_LIMIT = {"sm_80": 166912, "sm_90": 232448, "sm_100": 232448, "gfx942": 65536}
"""Bytes of shared memory one block can have."""


@dataclass(frozen=True)
class Launch:
    """One recorded launch: the kernel and everything it was called with."""

    kernel: Any
    arguments: dict[str, Any]

    @property
    def name(self) -> str:
        """The kernel's name without its suffix."""
        return str(self.kernel.fn.__name__).removesuffix("_kernel")

    @property
    def options(self) -> dict[str, Any]:
        """What goes to the compiler beside the constants."""
        names = ("num_warps", "num_stages", "enable_fp_fusion")
        return {"enable_fp_fusion": True, **{name: self.arguments[name] for name in names if name in self.arguments}}

    @property
    def config(self) -> Config:
        """The tile configuration of a grouped GEMM."""
        get = self.arguments
        return Config(get["BLOCK_M"], get["BLOCK_N"], get["BLOCK_K"], get["GROUP_M"], get["num_warps"], get["num_stages"])


@dataclass(frozen=True)
class Report:
    """What the compiler made of one launch. Spills are bytes on AMD's stack or STL/LDL instructions on NVIDIA's."""

    name: str
    target: str
    registers: int
    spills: int
    tensor_core_instructions: int
    warpgroup_instructions: int
    shared: int
    seconds: float


def launches(shape: ExpertShape, dtype: torch.dtype, target: str, configs: dict[str, Config] | None = None) -> list[Launch]:
    """Every kernel that a forward and backward pass starts on a target, in order; ``configs`` replaces choices by kernel."""
    recorded: list[Launch] = []

    def record(kernel: Any, grid: tuple[int, ...], device: torch.device, **arguments: Any) -> None:
        recorded.append(Launch(kernel, arguments))

    def choose(key: Any, device: torch.device, start: Callable[[Config], None], rehearse: Any = None) -> None:
        start((configs or {}).get(key.kernel) or default_config(key, SHARED_LIMIT[target], target))

    with _replaced(host, launch=record, run_gemm=choose):
        _whole_layer(shape, dtype)
    return recorded


def compile_launch(launch: Launch, target: str) -> Report:
    """Compile for a target and read registers, spills and tensor-core instructions from the machine code."""
    import triton
    from triton.backends.compiler import GPUTarget

    started = time.perf_counter()
    signature, constants, attributes = specialise(launch)
    source = triton.compiler.ASTSource(launch.kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget(*TARGETS[target]), options=launch.options)
    read = _read_amd(compiled.asm["amdgcn"]) if target.startswith("gfx") else _read_nvidia(compiled.asm["cubin"])
    return Report(launch.name, target, *read, int(compiled.metadata.shared), time.perf_counter() - started)


def _whole_layer(shape: ExpertShape, dtype: torch.dtype) -> None:
    def empty(*sizes: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.empty(*sizes, dtype=kind, device="meta")

    T, D, F, E, K = shape.T, shape.D, shape.F, shape.E, shape.K
    x, dy = empty(T, D), empty(T, D)
    w1, w3, w2 = empty(E, F, D), empty(E, F, D) if shape.gated else None, empty(E, D, F)
    b1, b3, b2 = (empty(E, F), empty(E, F) if shape.gated else None, empty(E, D)) if shape.bias else (None, None, None)
    indices, offsets, index_map, _ = backend.build_queue(empty(T, K, kind=torch.int64), E)
    gates, fp32 = empty(T * K, kind=torch.float32), torch.float32
    a, h = backend.up_projection(x, indices, offsets, w1, w3, b1, b3, shape.activation, True)
    y = backend.down_projection(a, offsets, w2, b2)
    backend.combine(y, index_map, empty(T, K, kind=fp32))
    if h is None:
        raise RuntimeError("up_projection was asked for H and gave none")
    dh, ag, _ = backend.backward_hidden(dy, indices, offsets, gates, h, w2, b2, shape.activation)
    backend.weight_grad_rows(dy, ag, indices, None, offsets, empty(E, D, F, kind=fp32))
    dxr = backend.input_grad(dh, offsets, w1, w3)
    backend.combine(dxr, index_map, None)
    backend.weight_grad_rows(dh[0], x, None, indices, offsets, empty(E, F, D, kind=fp32))
    if shape.bias:
        backend.bias_grad_rows(dh[0], None, None, offsets, empty(E, F, kind=fp32))
        backend.bias_grad_rows(dy, indices, gates, offsets, empty(E, D, kind=fp32))


def specialise(launch: Launch) -> tuple[dict[str, str], dict[tuple[int], Any], dict[tuple[int], list[list[Any]]]]:
    """Signature, constants and attributes as Triton's launcher derives them: 1 is a constant, multiples of 16 are marked."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name], constants[index,] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[parameter.name] = "*" + _TYPES[value.dtype]
            attributes[index,] = [["tt.divisibility", 16]]
        elif value == 1 and not parameter.do_not_specialize:
            signature[parameter.name], constants[index,] = "constexpr", 1
        else:
            signature[parameter.name] = "i32" if abs(value) <= host.INT32_MAX else "i64"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[index,] = [["tt.divisibility", 16]]
    return signature, constants, attributes


_TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
}


def _read_nvidia(cubin: bytes) -> tuple[int, int, int, int]:
    """(registers, STL + LDL, HMMA + HGMMA + UTC*MMA, HGMMA + UTC*MMA) of a cubin."""
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run([tools / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
        code = subprocess.run([tools / "nvdisasm", "-c", file.name], capture_output=True, text=True, check=True).stdout
    registers = max((int(found) for found in re.findall(r"REG:(\d+)", usage)), default=0)
    return registers, *count_nvidia(code)


def count_nvidia(code: str) -> tuple[int, int, int]:
    """(STL + LDL, HMMA + HGMMA + UTC*MMA, HGMMA + UTC*MMA) in NVIDIA machine code as text."""
    group = len(re.findall(r"\b(?:HGMMA|UTC\w*MMA)\b", code))
    return len(re.findall(r"\b(?:STL|LDL)\b", code)), group + len(re.findall(r"\bHMMA\b", code)), group


def _read_amd(code: str) -> tuple[int, int, int, int]:
    """(vector registers, bytes of scratch, MFMA, 0) of AMD assembly."""
    registers = max((int(found) for found in re.findall(r"\.vgpr_count:\s+(\d+)", code)), default=0)
    spills = sum(int(found) for found in re.findall(r"\.(?:vgpr_spill_count|sgpr_spill_count):\s+(\d+)", code))
    return registers, spills, len(re.findall(r"v_mfma_", code)), 0


@contextlib.contextmanager
def _replaced(module: Any, **attributes: Any) -> Iterator[None]:
    before = {name: getattr(module, name) for name in attributes}
    for name, value in attributes.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)
