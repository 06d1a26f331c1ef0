"""Clusters, GPUs and models by name; the numbers are in ``preset_data``."""

from __future__ import annotations

from torchmoe.alloc.models import MoESpec
from torchmoe.alloc.preset_data import MODELS, NODES
from torchmoe.alloc.specs import ClusterSpec, GPUSpec

__all__ = ["cluster_preset", "cluster_presets", "gpu_preset", "model_preset", "model_presets"]


def gpu_preset(name: str) -> GPUSpec:
    """An accelerator by name."""
    return GPUSpec.preset(name)


def cluster_presets() -> list[str]:
    """Kinds that :func:`cluster_preset` knows; append ``x`` and the number of GPUs."""
    return list(NODES)


def cluster_preset(text: str) -> ClusterSpec:
    """A cluster such as ``h800x128``: the kind and its number of GPUs (whole nodes, or a part of one)."""
    return ClusterSpec.preset(text)


def model_presets() -> list[str]:
    """Names that :func:`model_preset` knows."""
    return list(MODELS)


def model_preset(name: str) -> MoESpec:
    """A model by name."""
    return MoESpec.preset(name)
