"""What torchtitan 0.3.0 needs on torch 2.13 and on a host without an accelerator. Each shim is a no-op elsewhere.

torchtitan 0.3.0 was written against torch >= 2.14 and takes "cuda" for granted when it finds no accelerator. See docs/titan.md
for the list, with what happens without each of them.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import os
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch

from torchmoe.errors import ConfigError

__all__ = ["ensure", "gloo_safe", "spmd_backend"]

TORCHTITAN = "0.3.0"


class _CpuDeviceModule(types.ModuleType):
    """torch.cpu with the memory and property calls that torchtitan makes of a device module."""

    def __init__(self) -> None:
        super().__init__("torchmoe_cpu_device")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def get_device_name(self, device: object = None) -> str:
        return "cpu"

    def get_device_properties(self, device: object = None) -> types.SimpleNamespace:
        return types.SimpleNamespace(name="cpu", total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))

    def memory_stats(self, device: object = None) -> dict[str, int]:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"active_bytes.all.peak": peak, "reserved_bytes.all.peak": peak}

    def reset_peak_memory_stats(self, device: object = None) -> None:
        pass

    def empty_cache(self) -> None:
        pass


def _torch_version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def spmd_backend() -> str:
    """``parallelism.spmd_backend`` that works with this torch: FSDP2 reads spmd_types annotations from 2.14 on."""
    return "spmd_types" if _torch_version() >= (2, 14) else "partial_dtensor"


def _check_versions() -> None:
    if _torch_version() < (2, 13):
        raise ConfigError(
            f"torchmoe.titan needs torch >= 2.13, this is {torch.__version__}; upgrade torch, or use torchmoe without torchtitan"
        )
    try:
        have = importlib.metadata.version("torchtitan")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError("torchtitan is not installed; run pip install 'torchmoe[titan]'") from None
    if have != TORCHTITAN:
        raise ConfigError(
            f"torchtitan {have} is installed, torchmoe.titan needs {TORCHTITAN}; run pip install torchtitan=={TORCHTITAN}"
        )
    if importlib.util.find_spec("triton") is None:
        raise ConfigError(f"torchtitan {TORCHTITAN} imports triton, which is not installed; run pip install 'torchmoe[titan]'")


def _enable_cpu() -> None:
    """Rebind torchtitan's device to the CPU in every module that has already copied it."""
    import torchtitan.tools.utils as tools

    module = tools.device_module if isinstance(tools.device_module, _CpuDeviceModule) else _CpuDeviceModule()
    tools.device_type, tools.device_module = "cpu", module
    for name, mod in list(sys.modules.items()):
        if not name.startswith("torchtitan") or mod is None:
            continue
        names = vars(mod)
        if names.get("device_type") == "cuda":
            names["device_type"] = "cpu"
        if names.get("device_module") is torch.cuda:
            names["device_module"] = module


def _add_set_timeout() -> None:
    import torch.distributed as dist

    if not hasattr(dist, "set_timeout"):
        from torch.distributed.distributed_c10d import _set_pg_timeout

        dist.set_timeout = _set_pg_timeout  # type: ignore[attr-defined]


def _accept_microbatches(cls: type) -> None:
    """Give a stock schedule the ``step(arg_mbs=, kwarg_mbs=, target_mbs=)`` of torch 2.14."""
    old: Callable[..., Any] = cls.step  # type: ignore[attr-defined]
    if "arg_mbs" in inspect.signature(old).parameters:
        return

    def step(
        self: Any,
        *args: Any,
        target: Any = None,
        losses: Any = None,
        return_outputs: bool = True,
        loss_kwargs: Any = None,
        arg_mbs: Any = None,
        kwarg_mbs: Any = None,
        target_mbs: Any = None,
        **kwargs: Any,
    ) -> Any:
        if arg_mbs is None and kwarg_mbs is None and target_mbs is None:
            return old(
                self, *args, target=target, losses=losses, return_outputs=return_outputs, loss_kwargs=loss_kwargs, **kwargs
            )
        stages = getattr(self, "_stages", None) or [self._stage]
        for stage in stages:
            stage.has_backward = self._has_backward
            stage.clear_runtime_states()
        self._step_microbatches(arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs, loss_kwargs=loss_kwargs)
        if return_outputs:
            for stage in stages:
                if stage.is_last:
                    return self._merge_outputs(stage.output_chunks)
        return None

    cls.step = step  # type: ignore[attr-defined]


def ensure() -> None:
    """Make torchtitan importable and runnable here. Call it before a recipe imports torchtitan; calling it again is free.

    Raises:
        ConfigError: torch, torchtitan or triton is missing or too old.
    """
    _check_versions()
    _add_set_timeout()
    import torchtitan.trainer  # noqa: F401  everything that copies the device is imported with it
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

    _accept_microbatches(PipelineScheduleSingle)
    _accept_microbatches(PipelineScheduleMulti)
    if not torch.accelerator.is_available():
        _enable_cpu()
        # torchtitan's router asks for fp32 autocast, which the CPU has not and does not need
        warnings.filterwarnings("ignore", message="In CPU autocast, but the target dtype is not supported")


def gloo_safe(parallelize_fn: Callable[..., Any]) -> Callable[..., Any]:
    """A ``parallelize_fn`` whose FSDP2 modules reduce with SUM: gloo has no PREMUL_SUM. Unchanged on an accelerator."""
    if torch.accelerator.is_available():
        return parallelize_fn

    def parallelize(model: Any, **kwargs: Any) -> Any:
        from torch.distributed.fsdp import FSDPModule

        model = parallelize_fn(model, **kwargs)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        return model

    return parallelize
