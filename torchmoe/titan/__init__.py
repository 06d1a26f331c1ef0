"""The torchtitan 0.3 adapter. Call :func:`ensure` before torchtitan is imported."""

from torchmoe.titan.shims import ensure

__all__ = ["ensure"]
