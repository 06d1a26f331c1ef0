"""Who owns what: the ranks, groups, layers, experts and sequences of a disaggregated run. Pure data, no communication.

World order: replica by replica; inside a replica all attention groups ``A0, A1, ...``, then all FFN groups ``F0, F1, ...``.
MoE layer ``l`` has its attention on ``A[l mod pA]`` and its experts on ``F[l mod pF]``; the head is on ``A[L mod pA]``, or as in
the paper on the F group of the last layer (``head="ffn"``).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from torchmoe.errors import ConfigError, check_whole

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "Communicator",
    "Deadlines",
    "GroupId",
    "Head",
    "Placement",
    "Residual",
    "Role",
    "Where",
    "contiguous_owners",
    "split_range",
]

Role = Literal["attention", "ffn"]
Residual = Literal["local", "direct", "ride"]
Head = Literal["attention", "ffn"]
LETTER: dict[str, str] = {"attention": "A", "ffn": "F"}
HOST_KINDS = ("counts", "ids", "labels")
"""Message kinds that travel from and to host memory."""


@dataclass(frozen=True, order=True)
class GroupId:
    """One group of a pool. Its text, ``A0`` or ``F1``, is the key of a schedule's action list."""

    role: Role
    index: int

    def __str__(self) -> str:
        return f"{LETTER[self.role]}{self.index}"


@dataclass(frozen=True)
class Where:
    """What one global rank is: its replica, its group, and its index inside that group."""

    replica: int
    group: GroupId
    index: int

    @property
    def role(self) -> Role:
        return self.group.role


class Communicator(NamedTuple):
    """One process group for messages. ``host`` groups carry counts and ids in CPU memory."""

    name: str
    ranks: tuple[int, ...]
    host: bool


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """Seconds after which a wait gives up: one message, one whole step, start-up. Strictly ascending."""

    exchange: float = 60.0
    step: float = 300.0
    init: float = 600.0

    def __post_init__(self) -> None:
        if not 0 < self.exchange < self.step < self.init:
            raise ConfigError(
                f"deadlines exchange={self.exchange} step={self.step} init={self.init} (seconds) must be positive and ascending; "
                "a message gives up before its step, a step before the start-up"
            )


def split_range(start: int, stop: int, parts: int, index: int) -> range:
    """Part ``index`` of ``[start, stop)`` cut into ``parts`` contiguous pieces, sizes equal up to one."""
    n = stop - start
    return range(start + n * index // parts, start + n * (index + 1) // parts)


def contiguous_owners(num_experts: int, num_ranks: int) -> tuple[int, ...]:
    """Expert -> index in its F group: contiguous blocks, the first ``num_experts % num_ranks`` ranks hold one more."""
    base, more = divmod(num_experts, num_ranks)
    return tuple(i for i in range(num_ranks) for _ in range(base + (i < more)))


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The layout of a disaggregated run: sizes PER GROUP, so ``attention=[2, 2], ffn=[1, 1]`` is 4 + 2 ranks.

    Args:
        attention: ranks of each attention group ``A0, A1, ...`` (data parallel over sequences).
        ffn: ranks of each FFN group ``F0, F1, ...`` (expert parallel).
        num_layers: MoE layers L. A dense layer belongs to the attention stage of the next MoE layer, or to the head.
        num_experts: routed experts E of each MoE layer.
        replicas: whole A/F pipelines; their gradients are summed.
        owners: per layer, expert -> index in the layer's F group. Default: contiguous blocks, uneven sizes allowed.
        head: where final norm, head and loss run: ``attention`` (group ``A[L mod pA]``) or ``ffn`` (the F group of the last
            layer: an F -> F edge brings the last partial rows to the rank that is home of the sequence).
        deadlines: seconds after which waits give up.

    Raises:
        ConfigError: empty or non-positive groups, more groups than layers, an owner outside its group.
    """

    attention: Sequence[int]
    ffn: Sequence[int]
    num_layers: int
    num_experts: int
    replicas: int = 1
    owners: Sequence[Sequence[int]] | None = None
    head: Head = "attention"
    deadlines: Deadlines = field(default_factory=Deadlines)

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_experts", "replicas"):
            check_whole(name, getattr(self, name), 1, "give what the model and the run have")
        if not isinstance(self.deadlines, Deadlines):
            raise ConfigError(f"deadlines={self.deadlines!r} is no Deadlines; pass Deadlines(exchange=..., step=..., init=...)")
        for name in ("attention", "ffn"):
            given = getattr(self, name)
            sizes = tuple(given) if isinstance(given, Iterable) else ()
            object.__setattr__(self, name, sizes)
            if not sizes or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in sizes):
                raise ConfigError(
                    f"{name}={given!r}: every group needs at least one rank; give a list of positive sizes, one per group"
                )
            if len(sizes) > max(self.num_layers, 1):
                raise ConfigError(
                    f"{name}={list(sizes)} has {len(sizes)} groups for {self.num_layers} MoE layers; "
                    "use at most one group per layer"
                )
        if self.head not in ("attention", "ffn"):
            raise ConfigError(f"head={self.head!r} is unknown; use 'attention' or 'ffn'")
        if self.owners is None:
            return
        owners = tuple(tuple(o) for o in self.owners)
        object.__setattr__(self, "owners", owners)
        if len(owners) != self.num_layers:
            raise ConfigError(
                f"owners has {len(owners)} layers, the placement has {self.num_layers}; give one table per MoE layer"
            )
        for layer, table in enumerate(owners):
            n = self.ffn[layer % len(self.ffn)]
            if len(table) != self.num_experts or any(not isinstance(o, int) or not 0 <= o < n for o in table):
                raise ConfigError(
                    f"owners[{layer}]={list(table)} must name one of the {n} ranks of F{layer % len(self.ffn)} "
                    f"for each of {self.num_experts} experts"
                )

    # ---- sizes and ranks
    @property
    def ranks_per_replica(self) -> int:
        return sum(self.attention) + sum(self.ffn)

    @property
    def world_size(self) -> int:
        return self.replicas * self.ranks_per_replica

    def check_world(self, world_size: int) -> None:
        """Refuse a number of processes that this placement does not have."""
        if world_size != self.world_size:
            more = f" replicas={self.replicas}" if self.replicas > 1 else ""
            raise ConfigError(
                f"world size {world_size}: attention={list(self.attention)} ffn={list(self.ffn)}{more} needs {self.world_size}; "
                f"start {self.world_size} processes or change the group sizes"
            )

    def groups(self, role: Role | None = None) -> tuple[GroupId, ...]:
        """All groups of one replica, attention first; of one role if given."""
        a = tuple(GroupId("attention", j) for j in range(len(self.attention)))
        f = tuple(GroupId("ffn", j) for j in range(len(self.ffn)))
        return a + f if role is None else a if role == "attention" else f

    def size(self, group: GroupId) -> int:
        return (self.attention if group.role == "attention" else self.ffn)[group.index]

    def ranks(self, group: GroupId, replica: int = 0) -> range:
        """Global ranks of a group of one replica."""
        sizes = (*self.attention, *self.ffn)
        g = group.index + (len(self.attention) if group.role == "ffn" else 0)
        start = replica * self.ranks_per_replica + sum(sizes[:g])
        return range(start, start + sizes[g])

    def where(self, rank: int) -> Where:
        """What a global rank is."""
        if not 0 <= rank < self.world_size:
            raise ConfigError(f"rank {rank} is outside [0, {self.world_size}); the placement has {self.world_size} ranks")
        replica, local = divmod(rank, self.ranks_per_replica)
        for group in self.groups():
            ranks = self.ranks(group, replica)
            if rank in ranks:
                return Where(replica, group, ranks.index(rank))
        raise AssertionError(local)

    # ---- layers and experts
    def attention_group(self, layer: int) -> GroupId:
        """Group of the attention stage of MoE layer ``layer``; ``layer == num_layers`` is the head, maybe on an F group."""
        if layer == self.num_layers and self.head == "ffn":
            return self.ffn_group(layer - 1)
        return GroupId("attention", layer % len(self.attention))

    def ffn_group(self, layer: int) -> GroupId:
        return GroupId("ffn", layer % len(self.ffn))

    @property
    def head_group(self) -> GroupId:
        return self.attention_group(self.num_layers)

    @property
    def embedding_group(self) -> GroupId:
        return self.attention_group(0)

    def hands_over(self, layer: int) -> bool:
        """Whether the unit above MoE layer ``layer`` is on another group than its attention: ids (and residual) must travel."""
        return self.attention_group(layer) != self.attention_group(layer + 1)

    def stage_group(self, stage: int) -> GroupId:
        """Group that runs unit ``stage``: 2l attention of layer l, 2l + 1 its experts, 2L the head."""
        return self.ffn_group(stage // 2) if stage % 2 else self.attention_group(stage // 2)

    def stages(self, group: GroupId) -> tuple[int, ...]:
        """Units of a group, ascending."""
        return tuple(s for s in range(2 * self.num_layers + 1) if self.stage_group(s) == group)

    def expert_owners(self, layer: int) -> tuple[int, ...]:
        """Expert -> index in the layer's F group."""
        if not 0 <= layer < self.num_layers:
            raise ConfigError(f"layer {layer} is outside [0, {self.num_layers}); the placement has {self.num_layers} MoE layers")
        if self.owners is not None:
            return tuple(self.owners[layer])
        return contiguous_owners(self.num_experts, self.size(self.ffn_group(layer)))

    def local_experts(self, layer: int, index: int) -> tuple[int, ...]:
        """Logical ids, ascending, of the experts of ``layer`` on rank ``index`` of its F group."""
        self._check_index(self.ffn_group(layer), index)
        return tuple(e for e, o in enumerate(self.expert_owners(layer)) if o == index)

    def _check_index(self, group: GroupId, index: int) -> None:
        if not 0 <= index < self.size(group):
            raise ConfigError(f"rank {index} of {group} is outside [0, {self.size(group)}); {group} has {self.size(group)} ranks")

    # ---- sequences
    def sequences(self, group: GroupId, index: int, batch: int, replica: int = 0) -> range:
        """Global sequence indices of a micro-batch of ``batch`` sequences on rank ``index`` of an attention group.

        Rank i of M holds ``[B*i//M, B*(i+1)//M)`` of its replica's block; it may be empty.
        """
        self._check_index(group, index)
        if batch < 0:
            raise ConfigError(f"batch={batch} sequences must be 0 or more")
        block = split_range(0, batch, self.replicas, replica)
        return split_range(block.start, block.stop, self.size(group), index)

    def overlaps(self, group: GroupId, index: int, other: GroupId, batch: int, replica: int = 0) -> list[tuple[int, range]]:
        """For rank ``index`` of ``group``: the ranks of attention group ``other`` that hold its sequences, and which ones."""
        mine = self.sequences(group, index, batch, replica)
        out = []
        for i in range(self.size(other)):
            theirs = self.sequences(other, i, batch, replica)
            both = range(max(mine.start, theirs.start), min(mine.stop, theirs.stop))
            if len(both):
                out.append((i, both))
        return out

    # ---- communicators and gradients
    def edge(self, kind: str, layer: int) -> tuple[GroupId, GroupId]:
        """(source, destination) groups of a message kind of MoE layer ``layer``."""
        a, f, b = self.attention_group(layer), self.ffn_group(layer), self.attention_group(layer + 1)
        table = {
            "counts": (a, f),
            "dispatch": (a, f),
            "combine": (f, b),
            "d_combine": (b, f),
            "d_dispatch": (f, a),
            "ids": (a, b),
            "labels": (a, b),
            "residual": (a, b),
            "d_residual": (b, a),
        }
        if kind not in table:
            raise ConfigError(f"message kind {kind!r} is unknown; use one of {', '.join(table)}")
        return table[kind]

    def communicator(self, kind: str, layer: int) -> str:
        """Name of the communicator of a message, the same on every replica.

        One per kind; one per (source group, destination group) for the residual edges, and for all payloads if the roles have
        different numbers of groups (a group then sends one kind to several); own ones for what the fused head sends back,
        because it answers earlier than its turn. With fewer, correct-looking schedules deadlock.
        """
        name = kind
        uneven = len(self.attention) != len(self.ffn)
        if kind in ("residual", "d_residual") or (uneven and kind not in ("counts", "ids", "labels")):
            src, dst = self.edge(kind, layer)
            name = f"{kind}:{src}{dst}"
        if layer == self.num_layers - 1 and (kind in ("d_combine", "d_residual") or (kind == "combine" and self.head == "ffn")):
            name += ":head"
        return name

    def has_edge(self, kind: str, layer: int, residual: Residual) -> bool:
        """Whether messages of a kind exist for MoE layer ``layer``: those of a hand-over only where the group changes."""
        if kind == "ids":
            return self.hands_over(layer)
        if kind in ("residual", "d_residual"):
            return self.hands_over(layer) and residual != "ride"
        if kind == "labels":
            return layer == self.num_layers - 1 and self.head == "ffn"
        return True

    def communicators(self, residual: Residual) -> tuple[Communicator, ...]:
        """All communicators of every replica in one fixed order: every rank must create them in this order."""
        if residual not in get_args(Residual):
            raise ConfigError(f"residual={residual!r} is unknown; use one of {', '.join(get_args(Residual))}")
        out: dict[tuple[int, str], set[int]] = {}
        for replica in range(self.replicas):
            for kind in ("counts", "dispatch", "combine", "d_combine", "d_dispatch", "ids", "residual", "d_residual", "labels"):
                for layer in range(self.num_layers):
                    if not self.has_edge(kind, layer, residual):
                        continue
                    src, dst = self.edge(kind, layer)
                    members = out.setdefault((replica, self.communicator(kind, layer)), set())
                    members |= {*self.ranks(src, replica), *self.ranks(dst, replica)}
        return tuple(Communicator(name, tuple(sorted(m)), name in HOST_KINDS) for (_, name), m in out.items())

    def attention_gradient_ranks(self, group: GroupId) -> tuple[int, ...]:
        """Ranks over which the gradients of an attention group's parameters are summed: the group in every replica."""
        return tuple(r for rep in range(self.replicas) for r in self.ranks(group, rep))

    def expert_gradient_ranks(self, group: GroupId, index: int) -> tuple[int, ...]:
        """Ranks over which the gradients of the experts on rank ``index`` of an F group are summed: one per replica."""
        return tuple(self.ranks(group, rep)[index] for rep in range(self.replicas))

    def ride_gradient_ranks(self, layer: int) -> tuple[int, ...]:
        """residual='ride': ranks over which ffn_norm's gradient of a layer is summed: its A group and F group, all replicas."""
        groups = (self.attention_group(layer), self.ffn_group(layer))
        return tuple(r for rep in range(self.replicas) for g in groups for r in self.ranks(g, rep))

    def check_residual(self, residual: Residual) -> None:
        if residual == "local" and len(self.attention) > 1:
            raise ConfigError(
                f"residual='local' with {len(self.attention)} attention groups: the next layer's attention is on another group; "
                "use residual='direct' or one attention group"
            )
        if residual == "direct" and len(self.attention) == 1:
            raise ConfigError(
                "residual='direct' with one attention group would send rows to the rank that has them; use residual='local'"
            )

    @property
    def default_residual(self) -> Residual:
        return "local" if len(self.attention) == 1 else "direct"

    def meshes(self, device_type: str = "cpu") -> dict[str, DeviceMesh]:
        """A 1-D DeviceMesh per group of every replica, e.g. ``A0`` (``A0.1`` in replica 1). Collective: call on all ranks."""
        from torch.distributed.device_mesh import DeviceMesh

        out: dict[str, DeviceMesh] = {}
        for replica in range(self.replicas):
            for group in self.groups():
                name = str(group) if replica == 0 else f"{group}.{replica}"
                out[name] = DeviceMesh(device_type, list(self.ranks(group, replica)), mesh_dim_names=(group.role,))
        return out

    # ---- text
    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Placement:
        data: dict[str, Any] = json.loads(text)
        data["deadlines"] = Deadlines(**data["deadlines"])
        try:
            return cls(**data)
        except TypeError as e:
            raise ConfigError(f"not a placement: {e}; write it with Placement.to_json()") from None

    def fingerprint(self) -> str:
        """Short hash of the whole placement; all ranks compare it at start-up."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def explain(self) -> str:
        """Who holds what, one line a group and replica."""
        lines = [f"{self.world_size} ranks, {self.num_layers} MoE layers, {self.num_experts} experts"]
        for replica in range(self.replicas):
            for group in self.groups():
                layers = [str(s // 2) if s < 2 * self.num_layers else "head" for s in self.stages(group)]
                if group == self.embedding_group:
                    layers.insert(0, "embedding")
                ranks = self.ranks(group, replica)
                what = "attention" if group.role == "attention" else "experts"
                lines.append(f"  replica {replica} {group}: ranks {ranks.start}-{ranks.stop - 1}, {what} of {', '.join(layers)}")
        return "\n".join(lines)
