"""Process groups of a disaggregated run: every rank is alone in torchtitan's eyes, the placement does the rest."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.distributed import ParallelDims
from torchtitan.tools import utils

from torchmoe.comm.c10d import C10dTransport
from torchmoe.errors import ConfigError
from torchmoe.placement import Placement, Where

__all__ = ["RoleGroups", "RoleParallelDims"]


@dataclass
class RoleGroups:
    """The wire and the group over which this rank's gradients are summed (None: this rank alone)."""

    placement: Placement
    rank: int
    transport: C10dTransport
    gradients: Any

    @property
    def where(self) -> Where:
        return self.placement.where(self.rank)

    @classmethod
    def create(cls, placement: Placement, *, device: torch.device, record: bool = False) -> RoleGroups:
        """Create all process groups on all ranks in one order. Collective; all ranks must have the same placement.

        Raises:
            ConfigError: the world has another size, or a rank has another placement.
        """
        rank, world = dist.get_rank(), dist.get_world_size()
        placement.check_world(world)
        cls._compare(placement, rank, world)
        transport = C10dTransport.create(
            placement.communicators(placement.default_residual), device=device, deadlines=placement.deadlines, record=record
        )
        limit = datetime.timedelta(seconds=placement.deadlines.step)
        mine = None
        for group in placement.groups():
            if group.role == "attention":
                sets = [placement.attention_gradient_ranks(group)]
            else:
                sets = [placement.expert_gradient_ranks(group, i) for i in range(placement.size(group))]
            for ranks in sets:
                if len(ranks) > 1:
                    pg = dist.new_group(list(ranks), timeout=limit, group_desc=f"gradients of {group}")
                    if rank in ranks:
                        mine = pg
        return cls(placement, rank, transport, mine)

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
    options: Any

    @classmethod
    def of(cls, roles: RoleGroups, *, seed: int, options: Any, spmd_backend: Any) -> RoleParallelDims:
        dims = cls(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, world_size=1, spmd_backend=spmd_backend)
        dims.roles, dims.seed, dims.options = roles, seed, options
        return dims

    @property
    def pp_enabled(self) -> bool:
        return True

    def build_mesh(self) -> DeviceMesh:
        raise ConfigError("a rank of a disaggregated run has no torchtitan mesh; use its placement")

    def get_optional_mesh(self, dims: str | Sequence[str], *args: Any, **kwargs: Any) -> DeviceMesh | None:
        """Only ``loss`` exists: the ranks that share this rank's attention layers (torchtitan's balancing hook sums over it)."""
        if dims != "loss" or self.roles.gradients is None or self.roles.where.role != "attention":
            return None
        if "loss" not in self._single_axis_meshes:
            mesh = DeviceMesh.from_group(self.roles.gradients, utils.device_type, mesh_dim_names=("loss",))
            self._single_axis_meshes["loss"] = mesh
        return self._single_axis_meshes["loss"]  # type: ignore[no-any-return]

    def get_all_one_dimensional_meshes(self) -> dict[str, DeviceMesh]:
        return {}
