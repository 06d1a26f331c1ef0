"""Quantities with units: text to SI numbers and back. A bare number where a unit is needed is refused."""

from __future__ import annotations

import math
import re

from torchmoe.errors import ConfigError

__all__ = ["format_quantity", "quantity"]

_SI = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_IEC = {"": 1.0, "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_TIME = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_EXAMPLE = {"bytes": "80 GB or 80 GiB", "bytes/s": "50 GB/s or 400 Gbit/s", "flop/s": "989 TFLOP/s", "s": "5 us"}
_NUMBER = re.compile(r"\s*([-+]?[0-9][0-9_]*\.?[0-9]*(?:[eE][-+]?[0-9]+)?|inf)\s*(.*?)\s*")


def _scale(unit: str, kind: str) -> float | None:
    if kind == "s":
        return _TIME.get(unit)
    if kind == "flop/s":
        m = re.fullmatch(r"([kKMGTPE]?)(?:FLOPS|FLOP/s)", unit)
        return _SI[m[1]] if m else None
    per_second = kind == "bytes/s"
    m = re.fullmatch(r"(Ki|Mi|Gi|Ti|[kKMGTPE]?)(B|bit|b)(/s|ps)?", unit)
    if m is None or bool(m[3]) != per_second or (m[2] != "B" and not per_second):
        return None
    return (_IEC.get(m[1]) or _SI[m[1]]) / (1 if m[2] == "B" else 8)


def quantity(value: object, kind: str, *, name: str) -> float:
    """Read ``value`` ("80 GiB", "400 Gbit/s", "989 TFLOP/s", "5 us") as SI bytes, bytes/s, FLOP/s or seconds.

    Raises:
        ConfigError: no number, no unit, or a unit of another kind.
    """
    example = _EXAMPLE[kind]
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ConfigError(f"{name}={value!r} is not a quantity in {kind}; write e.g. {example}")
    m = _NUMBER.fullmatch(str(value))
    if m is None or not m[2]:
        if m is not None and float(m[1]) == 0:
            return 0.0  # zero is zero in every unit
        raise ConfigError(f"{name}={value!r} has no unit (a number in {kind}); write e.g. {example}")
    scale = _scale(m[2], kind)
    if scale is None:
        raise ConfigError(f"{name}={value!r}: {m[2]!r} is not a unit of {kind}; write e.g. {example}")
    number = float(m[1].replace("_", "")) * scale
    if not math.isfinite(number) or number < 0:
        raise ConfigError(f"{name}={value!r} must be finite and not negative")
    return number


def format_quantity(value: float, kind: str) -> str:
    """The shortest text that :func:`quantity` reads back to the same number."""
    unit = {"bytes": "B", "bytes/s": "B/s", "flop/s": "FLOP/s", "s": "s"}[kind]
    if kind == "s":
        steps = [(1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")]
    else:
        steps = [(f, p + unit) for p, f in reversed(_SI.items()) if p != "K"]
        if kind == "bytes" and value >= 2**20 and value % 2**20 == 0:
            steps = [(f, p + unit) for p, f in reversed(_IEC.items())]
    for scale, name in steps:
        if value >= scale:
            text = f"{value / scale!r} {name}".replace(".0 ", " ")
            if quantity(text, kind, name="") == value:
                return text
    return f"{value!r} {unit}"  # no scaled form is exact
