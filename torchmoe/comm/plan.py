"""The settings of an exchange that all ranks must share, and the handshake that compares them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from torchmoe.comm.transport import P2P, Transport
from torchmoe.errors import ConfigError, check_whole
from torchmoe.placement import Placement, Residual

__all__ = ["Combine", "Overflow", "Plan", "Sizes", "handshake"]

Combine = Literal["partial", "slots"]
Sizes = Literal["exact", "fixed"]
Overflow = Literal["raise", "drop", "grow"]
_BYTES = 4096


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name}={value!r} is unknown; use one of {', '.join(map(repr, allowed))}")


@dataclass(frozen=True)
class Plan:
    """Everything that decides what is sent where, and in which bytes. See :class:`~torchmoe.comm.m2n.M2NExchange`."""

    placement: Placement
    dim: int
    top_k: int
    dtype: torch.dtype
    residual: Residual
    combine: Combine
    sizes: Sizes
    capacity: int | None
    overflow: Overflow

    def __post_init__(self) -> None:
        check_whole("dim", self.dim, 1, "give the model width")
        check_whole("top_k", self.top_k, 1, "give the slots of a token")
        if not self.dtype.is_floating_point:
            raise ConfigError(f"dtype={self.dtype} cannot carry gradients; use a floating point type")
        _one_of("residual", self.residual, ("local", "direct", "ride"))
        _one_of("combine", self.combine, ("partial", "slots"))
        _one_of("sizes", self.sizes, ("exact", "fixed"))
        _one_of("overflow", self.overflow, ("raise", "drop", "grow"))
        self.placement.check_residual(self.residual)
        if self.combine == "slots" and self.residual == "ride":
            raise ConfigError(
                "combine='slots' with residual='ride': the norm's gradient is then summed per row, so slots could promise "
                "nothing; use combine='partial' or residual='direct'"
            )
        if self.sizes == "exact":
            if self.capacity is not None:
                raise ConfigError(f"capacity={self.capacity} is for sizes='fixed'; with sizes='exact' leave it out")
            return
        if self.capacity is None or self.capacity < 1:
            raise ConfigError(f"sizes='fixed' needs capacity={self.capacity} to be at least 1; give the rows per message")
        if self.combine == "slots":
            raise ConfigError("combine='slots' returns one row per slot, which sizes='fixed' does not count; use sizes='exact'")
        if self.residual == "ride" and self.overflow == "drop":
            raise ConfigError(
                "overflow='drop' with residual='ride' would drop a token's residual; use overflow='raise' or 'grow'"
            )
        if self.placement.head == "ffn" and self.placement.size(self.placement.head_group) != self.placement.attention[0]:
            raise ConfigError(
                f"sizes='fixed' with head='ffn' on {self.placement.size(self.placement.head_group)} ranks and "
                f"attention={list(self.placement.attention)}: F ranks do not know how a fixed message is cut for a next group of "
                "another size; use groups of one size or sizes='exact'"
            )
        if len(set(self.placement.attention)) > 1:
            raise ConfigError(
                f"sizes='fixed' with attention={list(self.placement.attention)}: F ranks do not know how a fixed message is cut "
                "for a next group of another size; use groups of one size or sizes='exact'"
            )

    def __str__(self) -> str:
        fixed = f" capacity={self.capacity} overflow={self.overflow}" if self.sizes == "fixed" else ""
        return (
            f"attention={list(self.placement.attention)} ffn={list(self.placement.ffn)} dim={self.dim} top_k={self.top_k} "
            f"dtype={str(self.dtype).removeprefix('torch.')} residual={self.residual} "
            f"combine={self.combine} sizes={self.sizes}{fixed}"
        )

    def fields(self) -> dict[str, Any]:
        """Name -> value of every setting, in the order in which they are compared."""
        placement = {k: v for k, v in asdict(self.placement).items() if k not in ("owners", "deadlines")}
        owners = [self.placement.expert_owners(layer) for layer in range(self.placement.num_layers)]
        return {
            **{k: list(v) if isinstance(v, tuple) else v for k, v in placement.items()},
            "owners": hashlib.sha256(json.dumps(owners).encode()).hexdigest()[:16],
            "dim": self.dim,
            "top_k": self.top_k,
            "dtype": str(self.dtype),
            "residual": self.residual,
            "combine": self.combine,
            "sizes": self.sizes,
            "capacity": self.capacity,
            "overflow": self.overflow,
        }

    @property
    def number(self) -> int:
        """A 62-bit hash of all settings."""
        return int.from_bytes(hashlib.sha256(json.dumps(self.fields()).encode()).digest()[:8], "big") >> 2


def handshake(plan: Plan, transport: Transport) -> None:
    """Send this rank's settings to every rank it shares a counts communicator with, and compare theirs."""
    placement, rank = plan.placement, transport.rank
    where = placement.where(rank)
    other = "ffn" if where.role == "attention" else "attention"
    peers = [
        r
        for g in placement.groups("ffn" if other == "ffn" else "attention")
        for r in placement.ranks(g, where.replica)
        if any(_meets(placement, layer, where.group, g) for layer in range(placement.num_layers))
    ]
    mine = plan.fields()
    text = json.dumps(mine).encode()
    if len(text) > _BYTES:
        raise ConfigError(f"the settings need {len(text)} B of text, {_BYTES} are carried; use fewer groups")
    sent = torch.zeros(_BYTES, dtype=torch.uint8, device="cpu")
    sent[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    got = {p: torch.zeros(_BYTES, dtype=torch.uint8, device="cpu") for p in peers}
    ops = [P2P("recv", p, b) for p, b in got.items()] + [P2P("send", p, sent) for p in peers]
    transport.post("counts", ops, "handshake").wait(placement.deadlines.init)
    for p, b in got.items():
        theirs: dict[str, Any] = json.loads(bytes(b.tolist()).rstrip(b"\0"))
        for name, value in mine.items():
            if theirs.get(name) != value:
                raise ConfigError(
                    f"rank {rank} has {name}={value!r}, rank {p} has {name}={theirs.get(name)!r}; "
                    "build every rank's exchange from the same settings"
                )


def _meets(placement: Placement, layer: int, a: object, b: object) -> bool:
    return {placement.attention_group(layer), placement.ffn_group(layer)} == {a, b}
