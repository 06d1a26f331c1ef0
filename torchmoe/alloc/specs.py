"""What the allocator and the planner know: a cluster, a model, a workload. Pure data; JSON or YAML in and out, with units.

In Python every number is SI (bytes, bytes per second, FLOP per second, seconds). In files every such number carries its unit
("80 GB", "400 Gbit/s", "989 TFLOP/s", "5 us"); a missing unit and an unknown key are refused.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from math import exp, log
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from torchmoe.alloc.preset_data import GPUS, NODES
from torchmoe.alloc.units import format_quantity, quantity
from torchmoe.costs.memory import FP32, MIXED, Precision
from torchmoe.errors import ConfigError

__all__ = ["ClusterSpec", "Efficiency", "GPUSpec", "Workload", "interpolate", "load_mapping"]

S = TypeVar("S", bound="_Spec")


def load_mapping(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """A JSON or YAML file (by its ending), or a mapping, as a dict.

    Raises:
        ConfigError: the file is missing, unreadable, or not a mapping.
    """
    if isinstance(source, Mapping):
        return dict(source)
    path = Path(source)
    try:
        text = path.read_text()
    except OSError as e:
        raise ConfigError(f"cannot read {path}: {e.strerror}; give a JSON or YAML file or a preset's name") from None
    except UnicodeDecodeError as e:
        raise ConfigError(f"{path} is not text ({e.reason} at byte {e.start}); give a JSON or YAML file") from None
    if path.suffix in (".yaml", ".yml"):
        try:
            import yaml
        except ImportError:
            raise ConfigError(f"{path} is YAML and pyyaml is not installed; install pyyaml or write JSON") from None
        try:
            data = yaml.safe_load(text)
        except yaml.YAMLError as e:
            raise ConfigError(f"{path} is not YAML: {' '.join(str(e).split())}") from None
    else:
        try:
            data = json.loads(text)
        except json.JSONDecodeError as e:
            raise ConfigError(f"{path} is not JSON: {e}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds a {type(data).__name__}, not a mapping of keys to values")
    return data


class _Spec:
    """Reading and writing shared by the specs. ``UNITS`` maps a field to the kind of its unit."""

    UNITS: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def from_dict(cls: type[S], data: Mapping[str, Any]) -> S:
        """Build from a mapping whose quantities carry units; unknown and missing keys are refused."""
        known = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]
        if not isinstance(data, Mapping):
            raise ConfigError(f"{cls.__name__} is read from a mapping of keys to values, not from {data!r}")
        for key in data:
            if key not in known:
                raise ConfigError(f"{cls.__name__} has no key {key!r}; use {', '.join(known)}")
        for name, f in known.items():
            if name not in data and f.default is MISSING and f.default_factory is MISSING:
                raise ConfigError(f"{cls.__name__} needs the key {name!r}")
        return cls(**{k: _typed(known[k].type, k, cls._read(k, v)) for k, v in data.items()})

    @classmethod
    def _read(cls, key: str, value: Any) -> Any:
        kind = cls.UNITS.get(key)
        if kind is None:
            return value
        if isinstance(value, Mapping):
            return {k: quantity(v, kind, name=f"{key}.{k}") for k, v in value.items()}
        return quantity(value, kind, name=key)

    def to_dict(self) -> dict[str, Any]:
        """The mapping that :meth:`from_dict` reads."""
        out: dict[str, Any] = {}
        for f in fields(self):  # type: ignore[arg-type]
            value = getattr(self, f.name)
            kind = self.UNITS.get(f.name)
            if isinstance(value, _Spec):
                value = value.to_dict()
            elif kind is not None and isinstance(value, Mapping):
                value = {k: format_quantity(v, kind) for k, v in value.items()}
            elif kind is not None:
                value = format_quantity(value, kind)
            elif isinstance(value, Efficiency):
                value = value.to_json()
            out[f.name] = list(value) if isinstance(value, tuple) else value
        return out

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)


def interpolate(points: Sequence[tuple[float, float]], x: float) -> float:
    """y at x > 0 on straight lines over the logarithms of both; constant outside the first and the last point.

    Exact where y grows as a power of x: a kernel that is all overhead (share ~ FLOPs), one that is saturated (constant share).
    """
    if x <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if x <= x1:
            return y0 * exp(log(y1 / y0) * log(x / x0) / log(x1 / x0))
    return points[-1][1]


_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "str": ((str,), "text"),
    "bool": ((bool,), "true or false"),
    "Mapping[str, float]": ((Mapping,), "a mapping of names to quantities"),
    "tuple[int, ...]": ((list, tuple), "a list of whole numbers"),
}


def _typed(annotation: Any, key: str, value: Any) -> Any:
    """``value`` if it is what the field's annotation says; annotations not listed are checked by the spec itself."""
    found = _KINDS.get(str(annotation))
    if found is not None and (not isinstance(value, found[0]) or (isinstance(value, bool) and bool not in found[0])):
        raise ConfigError(f"{key}={value!r} must be {found[1]}")
    return value


@dataclass(frozen=True)
class Efficiency:
    """Share of a peak that a kernel reaches, by size: points (size, share), joined by :func:`interpolate`.

    Args:
        points: ascending sizes with a share in (0, 1]. Outside the first and last point the share is constant.
    """

    points: tuple[tuple[float, float], ...] = ((1.0, 1.0),)

    def __post_init__(self) -> None:
        object.__setattr__(self, "points", tuple((float(x), float(y)) for x, y in self.points))
        xs = [x for x, _ in self.points]
        if not xs or xs[0] <= 0 or any(b <= a for a, b in itertools.pairwise(xs)):
            raise ConfigError(f"efficiency sizes {xs} must be positive and ascending")
        if any(not 0 < y <= 1 for _, y in self.points):
            raise ConfigError(f"efficiency shares {[y for _, y in self.points]} must be in (0, 1]")

    def __call__(self, size: float) -> float:
        return interpolate(self.points, size)

    @classmethod
    def constant(cls, share: float) -> Efficiency:
        return cls(((1.0, share),))

    @classmethod
    def parse(cls, value: Any, *, name: str) -> Efficiency:
        """A share, or a list of [size, share]."""
        if isinstance(value, Efficiency):
            return value
        if isinstance(value, int | float) and not isinstance(value, bool):
            return cls.constant(float(value))
        try:
            return cls(tuple((float(x), float(y)) for x, y in value))
        except (TypeError, ValueError) as e:
            if isinstance(e, ConfigError):
                raise
            raise ConfigError(f"{name}={value!r} must be a share or a list of [size, share]") from None

    def to_json(self) -> float | list[list[float]]:
        return self.points[0][1] if len(self.points) == 1 else [list(p) for p in self.points]


@dataclass(frozen=True, kw_only=True)
class GPUSpec(_Spec):
    """One accelerator as the training program sees it (a GCD of an MI250X counts as one).

    Args:
        peak_flops: dense peak by dtype, FLOP/s.
        hbm_bytes, hbm_bandwidth: memory, bytes and bytes/s.
        attention: achieved share of the peak of attention's score products, by sequence length in tokens.
        gemm: of the dense projections, by rows.
        grouped_gemm: of the grouped expert products, by tokens per expert.
        source: where the shares come from.
    """

    UNITS: ClassVar[Mapping[str, str]] = {"peak_flops": "flop/s", "hbm_bytes": "bytes", "hbm_bandwidth": "bytes/s"}

    name: str
    peak_flops: Mapping[str, float]
    hbm_bytes: float
    hbm_bandwidth: float
    attention: Efficiency = field(default_factory=Efficiency)
    gemm: Efficiency = field(default_factory=Efficiency)
    grouped_gemm: Efficiency = field(default_factory=Efficiency)
    source: str = "peak rates, no losses"

    def __post_init__(self) -> None:
        for key in ("attention", "gemm", "grouped_gemm"):
            object.__setattr__(self, key, Efficiency.parse(getattr(self, key), name=key))
        for name in ("hbm_bytes", "hbm_bandwidth"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)} of {self.name} must be positive")
        if not self.peak_flops or any(not v > 0 for v in self.peak_flops.values()):
            raise ConfigError(f"peak_flops={dict(self.peak_flops)} of {self.name} needs a positive peak for at least one dtype")

    @classmethod
    def preset(cls, name: str) -> GPUSpec:
        """An accelerator by name.

        Raises:
            ConfigError: no such preset.
        """
        if name.lower() not in GPUS:
            raise ConfigError(f"no GPU preset {name!r}; use {', '.join(GPUS)} or give its numbers")
        return cls(**GPUS[name.lower()])

    def peak(self, dtype: str) -> float:
        if dtype not in self.peak_flops:
            raise ConfigError(f"{self.name} has no peak for dtype {dtype!r}; it has {', '.join(self.peak_flops)}")
        return self.peak_flops[dtype]


@dataclass(frozen=True, kw_only=True)
class ClusterSpec(_Spec):
    """Equal nodes behind a network. Bandwidths are per direction; NICs are full duplex.

    Args:
        gpu: the accelerator.
        nodes, gpus_per_node, nics_per_node: NICs are split evenly over the node's GPUs unless an allocation moves them.
        nic_bandwidth: one NIC, bytes/s; ``nic_latency`` one message, seconds.
        intra_bandwidth: one GPU to the others of its node, bytes/s; ``intra_latency`` one message, seconds.
        nodes_per_switch: nodes behind one switch (Piper's N_h); 0: all nodes.
        cross_switch_latency: added to a message between switch groups, seconds.
        cross_switch_share: share of the NIC bandwidth that is left between switch groups, in (0, 1].
        network_efficiency: share of a NIC's bandwidth that the exchange reaches, in (0, 1].
        reserved_bytes: memory per GPU that the plan may not use (CUDA context, communicators, fragmentation).
    """

    UNITS: ClassVar[Mapping[str, str]] = {
        "nic_bandwidth": "bytes/s",
        "nic_latency": "s",
        "intra_bandwidth": "bytes/s",
        "intra_latency": "s",
        "cross_switch_latency": "s",
        "reserved_bytes": "bytes",
    }

    name: str
    gpu: GPUSpec
    nodes: int
    gpus_per_node: int
    nics_per_node: int
    nic_bandwidth: float
    intra_bandwidth: float
    nic_latency: float = 5e-6
    intra_latency: float = 2e-6
    nodes_per_switch: int = 0
    cross_switch_latency: float = 0.0
    cross_switch_share: float = 1.0
    network_efficiency: float = 1.0
    reserved_bytes: float = 6e9

    def __post_init__(self) -> None:
        for name in ("nodes", "gpus_per_node"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)!r} of cluster {self.name!r} must be a whole number of at least 1")
        if self.gpus > 10_000_000:
            raise ConfigError(f"cluster {self.name!r} has {self.gpus:,} GPUs; plans are made for at most 10 million")
        if not isinstance(self.nics_per_node, int) or self.nics_per_node < 0:
            raise ConfigError(f"nics_per_node={self.nics_per_node!r} of cluster {self.name!r} must be a whole number from 0")
        if self.nodes > 1 and (self.nics_per_node < 1 or self.nic_bandwidth <= 0):
            raise ConfigError(
                f"{self.nodes} nodes with nics_per_node={self.nics_per_node} cannot reach each other; "
                "give each node a NIC with its bandwidth, or use nodes=1"
            )
        if self.gpus_per_node > 1 and self.intra_bandwidth <= 0:
            raise ConfigError(f"intra_bandwidth={self.intra_bandwidth} must be positive with {self.gpus_per_node} GPUs per node")
        for name in ("cross_switch_share", "network_efficiency"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be in (0, 1]")
        if self.reserved_bytes >= self.gpu.hbm_bytes:
            raise ConfigError(
                f"reserved_bytes={self.reserved_bytes:g} leaves nothing of {self.gpu.hbm_bytes:g} bytes; reserve less"
            )

    @classmethod
    def _read(cls, key: str, value: Any) -> Any:
        if key == "gpu":
            return GPUSpec.preset(value) if isinstance(value, str) else GPUSpec.from_dict(value)
        return super()._read(key, value)

    @classmethod
    def preset(cls, text: str) -> ClusterSpec:
        """A cluster such as ``h800x128``: the kind and its number of GPUs (whole nodes, or a part of one).

        Raises:
            ConfigError: no such kind, no number of GPUs, or nodes that are not whole.
        """
        kind, _, number = text.lower().rpartition("x")
        if kind not in NODES or not (number.isascii() and number.isdigit() and len(number) < 9 and int(number)):
            raise ConfigError(
                f"no cluster preset {text!r}; write KINDxGPUS with KIND one of {', '.join(NODES)} (h800x128), or give a JSON file"
            )
        one = cls(name=text, gpu=GPUSpec.preset(kind), nodes=1, network_efficiency=0.85, **NODES[kind])
        return replace(one.resized(int(number)), name=text)

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def nics(self) -> int:
        return self.nodes * self.nics_per_node

    @property
    def usable_bytes(self) -> float:
        """Memory per GPU that a plan may fill."""
        return self.gpu.hbm_bytes - self.reserved_bytes

    @property
    def nic_share(self) -> float:
        """Bytes/s of the network that one GPU has when a node's NICs are shared evenly, efficiency included."""
        return self.nics_per_node * self.nic_bandwidth * self.network_efficiency / self.gpus_per_node

    @property
    def fast_domain(self) -> int:
        """GPUs within one hop: the node, or the nodes behind one switch."""
        return self.gpus_per_node * min(self.nodes, self.nodes_per_switch or 1)

    def resized(self, gpus: int) -> ClusterSpec:
        """The same hardware with ``gpus`` GPUs: whole nodes, or a part of one."""
        per = self.gpus_per_node
        if gpus < per:
            return replace(self, nodes=1, gpus_per_node=gpus, nics_per_node=max(1, self.nics_per_node * gpus // per))
        if gpus % per:
            raise ConfigError(f"{gpus} GPUs are not whole nodes of {per}; use {gpus // per * per} or {(gpus // per + 1) * per}")
        return replace(self, nodes=gpus // per)

    @classmethod
    def load(cls, source: str | Path | Mapping[str, Any]) -> ClusterSpec:
        """A preset ("h800x128": kind and GPUs), a JSON or YAML file, or a mapping."""
        if isinstance(source, str) and not source.endswith((".json", ".yaml", ".yml")):
            return cls.preset(source)
        return cls.from_dict(load_mapping(source))


@dataclass(frozen=True, kw_only=True)
class Workload(_Spec):
    """What is trained per step.

    Args:
        seq_len: tokens per sequence.
        micro_batch: sequences that one pipeline (one replica's attention group, or one EP group) takes at a time.
        global_batch: sequences per optimizer step.
        dtype: of the products.
        state: "mixed" (16 B per parameter: 2 + 2 + 4 + 8) or "fp32" (4 + 4 + 8).
        recompute: "none" or "full": of attention halves only the inputs are kept, and their forward is repeated.
        save: what the routed experts keep: "input", "half", "preact", "all".
        imbalance: load of the busiest expert rank over the mean.
        causal: count half of the score products, as attention kernels do.
        shard_optimizer: spread optimizer state over the ranks that hold the same parameters.
    """

    seq_len: int
    micro_batch: int
    global_batch: int
    dtype: str = "bf16"
    state: Literal["mixed", "fp32"] = "mixed"
    recompute: Literal["none", "full"] = "none"
    save: Literal["input", "half", "preact", "all"] = "preact"
    imbalance: float = 1.0
    causal: bool = True
    shard_optimizer: bool = False

    def __post_init__(self) -> None:
        for name in ("seq_len", "micro_batch", "global_batch"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)!r} must be a whole number of at least 1")
        if self.global_batch % self.micro_batch:
            raise ConfigError(
                f"global_batch={self.global_batch} is not a multiple of micro_batch={self.micro_batch} sequences; change one"
            )
        for name, allowed in (
            ("state", ("mixed", "fp32")),
            ("recompute", ("none", "full")),
            ("save", ("input", "half", "preact", "all")),
        ):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name}={getattr(self, name)!r} is unknown; use one of {', '.join(allowed)}")
        if not self.imbalance >= 1:
            raise ConfigError(f"imbalance={self.imbalance} is the busiest rank over the mean; it is at least 1")

    @property
    def precision(self) -> Precision:
        return MIXED if self.state == "mixed" else FP32

    @property
    def tokens(self) -> int:
        """Tokens per micro-batch of one pipeline."""
        return self.seq_len * self.micro_batch

    @property
    def global_tokens(self) -> int:
        return self.seq_len * self.global_batch

    @property
    def itemsize(self) -> int:
        return {"fp64": 8, "fp32": 4, "tf32": 4, "fp8": 1}.get(self.dtype, 2)

    @classmethod
    def load(cls, source: str | Path | Mapping[str, Any]) -> Workload:
        return cls.from_dict(load_mapping(source))
