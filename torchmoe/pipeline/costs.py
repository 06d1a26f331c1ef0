"""What actions cost: seconds of computations, bytes of messages and of live units. Input of the simulator."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torchmoe.errors import ConfigError
from torchmoe.pipeline.action import Action, Op

__all__ = ["Costs", "PerStage"]

PerStage = float | Mapping[int, float] | Callable[[int], float]
"""One number for every stage, a number per stage, or a function of the stage."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs of one micro-batch. A full backward costs ``input_grad + weight_grad``; OVERLAP_F_B the sum times ``overlap``.

    Args:
        forward, input_grad, weight_grad: seconds on each rank of the stage's group.
        message: bytes of each message kind, summed over all ranks of the source group (without self-copies).
        parts: parts that a computation or message with a part number (``chunk.1``, ``dispatch.1``) is one of.
        overlap: time of an overlapped pair relative to one after the other.
        microbatch: factor per micro-batch (lengths differ), for times, bytes and activations.
        ranks: per group, a factor per rank for times of its computations (uneven experts); needs ``per_rank=True``.
        activation: bytes per rank of one live unit, from its forward to its full backward or weight gradient.
        held: bytes per rank that the input gradient adds until the weight gradient has run.

    Raises:
        ConfigError: a negative, infinite or NaN cost (checked on use for functions).
    """

    forward: PerStage = 1.0
    input_grad: PerStage = 1.0
    weight_grad: PerStage = 1.0
    message: Mapping[str, float] = field(default_factory=dict)
    parts: int = 1
    overlap: float = 1.0
    microbatch: Sequence[float] | None = None
    ranks: Mapping[str, Sequence[float]] = field(default_factory=dict)
    activation: PerStage = 0.0
    held: PerStage = 0.0

    def __post_init__(self) -> None:
        for name in ("forward", "input_grad", "weight_grad", "activation", "held"):
            value = getattr(self, name)
            for stage, x in value.items() if isinstance(value, Mapping) else [] if callable(value) else [(None, value)]:
                _check(name if stage is None else f"{name}[{stage}]", x)
        for kind, x in self.message.items():
            _check(f"message[{kind!r}]", x)
        _check("overlap", self.overlap)
        for m, x in enumerate(self.microbatch or ()):
            _check(f"microbatch[{m}]", x)
        for group, factors in self.ranks.items():
            for i, x in enumerate(factors):
                _check(f"ranks[{group!r}][{i}]", x)
        if self.parts < 1:
            raise ConfigError(f"parts={self.parts} must be at least 1; use the a2a_chunks of the schedule")

    def seconds(self, action: Action) -> float:
        """Time of a computation (of both, for an overlapped pair)."""
        if action.sub:
            return self.overlap * sum(map(self.seconds, action.sub))
        s = action.stage
        if action.op is Op.FORWARD:
            time = per_stage("forward", self.forward, s)
        else:
            time = 0.0
            if action.op is not Op.BACKWARD_WEIGHT:
                time += per_stage("input_grad", self.input_grad, s)
            if action.op is not Op.BACKWARD_INPUT:
                time += per_stage("weight_grad", self.weight_grad, s)
        if action.edge is not None:
            time /= self.parts
        return time * self.factor(action.microbatch)

    def num_bytes(self, kind: str, microbatch: int | None) -> float:
        """Bytes of a message of the whole source group; unknown kinds cost nothing."""
        size = self.message.get(kind)
        if size is None and "." in kind:
            size = self.message.get(kind.partition(".")[0], 0.0) / self.parts
        return (size or 0.0) * self.factor(microbatch)

    def factor(self, microbatch: int | None) -> float:
        if self.microbatch is None or microbatch is None:
            return 1.0
        if microbatch >= len(self.microbatch):
            raise ConfigError(
                f"microbatch has {len(self.microbatch)} factors, the schedule has a micro-batch {microbatch}; give one each"
            )
        return self.microbatch[microbatch]


def per_stage(name: str, value: PerStage, stage: int) -> float:
    """The value of one stage, checked."""
    if isinstance(value, Mapping):
        if stage not in value:
            raise ConfigError(f"{name} has no value for stage {stage}; give every stage one")
        return value[stage]
    if callable(value):
        x = value(stage)
        _check(f"{name}({stage})", x)
        return x
    return value


def _check(name: str, value: float) -> None:
    if not (0 <= value < math.inf):
        raise ConfigError(f"{name}={value} must be 0 or more, and finite")
