"""Process groups of a disaggregated run: every rank is alone in torchtitan's eyes, the placement does the rest."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.components.dataloader import DataloaderExhaustedError
from torchtitan.distributed import ParallelDims
from torchtitan.tools import utils

from torchmoe.comm.c10d import C10dTransport, is_lost
from torchmoe.errors import ConfigError, PeerLost
from torchmoe.placement import Placement, Residual, Where
from torchmoe.titan.options import DisagConfig
from torchmoe.titan.sums import gradient_ranks

__all__ = ["RoleGroups", "RoleParallelDims"]


@dataclass
class RoleGroups:
    """The wire, and the process groups of this rank over which gradients are summed, by their ranks."""

    placement: Placement
    rank: int
    transport: C10dTransport
    groups: dict[tuple[int, ...], Any]

    @property
    def where(self) -> Where:
        return self.placement.where(self.rank)

    @property
    def same_layers(self) -> Any:
        """The process group of the ranks that hold this rank's layers in all replicas; None if it is alone."""
        return self.groups.get(self.placement.attention_gradient_ranks(self.where.group))

    def attention_mesh(self) -> DeviceMesh | None:
        """The ranks of this rank's attention group; None on FFN ranks, and for a group of one."""
        if self.where.role != "attention" or self.same_layers is None:
            return None
        return DeviceMesh.from_group(self.same_layers, utils.device_type, mesh_dim_names=("fsdp",))

    @classmethod
    def create(cls, placement: Placement, *, residual: Residual, device: torch.device, record: bool = False) -> RoleGroups:
        """Create all process groups on all ranks in one order. Collective; all ranks must have the same placement.

        Raises:
            ConfigError: the world has another size, or a rank has another placement.
        """
        rank, world = dist.get_rank(), dist.get_world_size()
        placement.check_world(world)
        cls._compare(placement, rank, world)
        transport = C10dTransport.create(
            placement.communicators(residual), device=device, deadlines=placement.deadlines, record=record
        )
        limit = datetime.timedelta(seconds=placement.deadlines.step)
        groups = {}
        for ranks in gradient_ranks(placement, residual):
            pg = dist.new_group(list(ranks), timeout=limit, group_desc=f"gradients of ranks {ranks}")
            if rank in ranks:
                groups[ranks] = pg
        return cls(placement, rank, transport, groups)

    def say(self, rank: int) -> str:
        where = self.placement.where(rank)
        return f"rank {rank} ({where.group}[{where.index}])"

    @contextmanager
    def naming_the_lost(self, what: str) -> Iterator[None]:
        """Run a part of the job; an error in communication is raised as one that names the rank that failed first.

        Args:
            what: where the job is, for the message.

        Raises:
            PeerLost: another rank died, froze or failed.
        """
        try:
            yield
        except DataloaderExhaustedError:  # the regular end of a finite loader
            raise
        except Exception as e:
            self.transport.report(e)
            if not is_lost(e):
                raise
            found = self.transport.examine()
            if found.dead:
                peer, how = found.dead[0], f"{', '.join(map(self.say, found.dead))} died or stopped"
            elif found.first is not None:
                peer, how = found.first.rank, f"{self.say(found.first.rank)} gave up first: {found.first.text}"
            elif found.silent_store:
                peer, how = 0, f"{found.silent_store}"
            else:
                raise
            text = " ".join(str(e).split())
            error = PeerLost(f"{what} on {self.say(self.rank)}: {how}; this rank was waiting here: {text}")
            error.peer = peer
            raise error from e

    @staticmethod
    def _compare(placement: Placement, rank: int, world: int) -> None:
        prints: list[str | None] = [None] * world
        dist.all_gather_object(prints, placement.fingerprint())
        other = next((r for r, p in enumerate(prints) if p != prints[0]), None)
        if other is not None:
            raise ConfigError(
                f"rank {other} has another placement than rank 0 ({prints[other]} and {prints[0]}); "
                "start all ranks with one recipe"
            )


class RoleParallelDims(ParallelDims):
    """torchtitan's view of one rank: one process, no parallelism of its own, and a schedule that drives it (``pp_enabled``)."""

    roles: RoleGroups
    seed: int
    options: DisagConfig
    optimizer: Any

    @classmethod
    def of(cls, roles: RoleGroups, *, seed: int, options: DisagConfig, optimizer: Any, spmd_backend: Any) -> RoleParallelDims:
        dims = cls(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, world_size=1, spmd_backend=spmd_backend)
        dims.roles, dims.seed, dims.options, dims.optimizer = roles, seed, options, optimizer
        return dims

    @property
    def pp_enabled(self) -> bool:
        return True

    def build_mesh(self) -> DeviceMesh:
        raise ConfigError("a rank of a disaggregated run has no torchtitan mesh; use its placement")

    def get_optional_mesh(self, dims: str | Sequence[str], *args: Any, **kwargs: Any) -> DeviceMesh | None:
        """Only ``loss`` exists: the ranks that share this rank's attention layers (torchtitan's balancing hook sums over it)."""
        if dims != "loss" or self.roles.same_layers is None or self.roles.where.role != "attention":
            return None
        if "loss" not in self._single_axis_meshes:
            mesh = DeviceMesh.from_group(self.roles.same_layers, utils.device_type, mesh_dim_names=("loss",))
            self._single_axis_meshes["loss"] = mesh
        return self._single_axis_meshes["loss"]  # type: ignore[no-any-return]

    def get_all_one_dimensional_meshes(self) -> dict[str, DeviceMesh]:
        return {}
