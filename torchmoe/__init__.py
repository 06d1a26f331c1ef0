"""torchmoe: small composable modules for training Mixture-of-Experts models.

Everything named in ``__all__`` is loaded on first use, so that ``import torchmoe`` costs next to nothing over ``import torch``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "DispatchQueue": "torchmoe.dispatch",
    "FusedExpertMLP": "torchmoe.experts",
    "RankExperts": "torchmoe.experts",
    "Routing": "torchmoe.router",
    "TopKRouter": "torchmoe.router",
    "MoELayer": "torchmoe.layer",
    "Deadlines": "torchmoe.placement",
    "Placement": "torchmoe.placement",
    "C10dTransport": "torchmoe.comm.c10d",
    "Key": "torchmoe.comm.m2n",
    "AllToAllExchange": "torchmoe.comm.all_to_all",
    "AutoAllToAll": "torchmoe.comm.auto",
    "HierarchicalAllToAll": "torchmoe.comm.halo",
    "M2NExchange": "torchmoe.comm.m2n",
    "Schedule": "torchmoe.pipeline.action",
    "lower": "torchmoe.pipeline.lower",
    "AFPipeSchedule": "torchmoe.pipeline.schedules.afpipe",
    "AttentionOutput": "torchmoe.pipeline.runtime.stage",
    "MicroBatch": "torchmoe.pipeline.runtime.stage",
    "RooflineAllocator": "torchmoe.alloc.allocator",
    "Runner": "torchmoe.pipeline.runtime.runner",
    "Stages": "torchmoe.pipeline.runtime.stage",
}

__all__ = ["__version__", *sorted(_HOME)]

if TYPE_CHECKING:
    from torchmoe.alloc.allocator import RooflineAllocator as RooflineAllocator
    from torchmoe.comm.all_to_all import AllToAllExchange as AllToAllExchange
    from torchmoe.comm.auto import AutoAllToAll as AutoAllToAll
    from torchmoe.comm.c10d import C10dTransport as C10dTransport
    from torchmoe.comm.halo import HierarchicalAllToAll as HierarchicalAllToAll
    from torchmoe.comm.m2n import Key as Key
    from torchmoe.comm.m2n import M2NExchange as M2NExchange
    from torchmoe.dispatch import DispatchQueue as DispatchQueue
    from torchmoe.experts import FusedExpertMLP as FusedExpertMLP
    from torchmoe.experts import RankExperts as RankExperts
    from torchmoe.layer import MoELayer as MoELayer
    from torchmoe.pipeline.action import Schedule as Schedule
    from torchmoe.pipeline.lower import lower as lower
    from torchmoe.pipeline.runtime.runner import Runner as Runner
    from torchmoe.pipeline.runtime.stage import AttentionOutput as AttentionOutput
    from torchmoe.pipeline.runtime.stage import MicroBatch as MicroBatch
    from torchmoe.pipeline.runtime.stage import Stages as Stages
    from torchmoe.pipeline.schedules.afpipe import AFPipeSchedule as AFPipeSchedule
    from torchmoe.placement import Deadlines as Deadlines
    from torchmoe.placement import Placement as Placement
    from torchmoe.router import Routing as Routing
    from torchmoe.router import TopKRouter as TopKRouter


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'torchmoe' has no attribute {name!r}; it has {', '.join(sorted(_HOME))}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
