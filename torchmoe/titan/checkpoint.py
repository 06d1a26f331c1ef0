"""Experts in DCP checkpoints: chunks at logical offsets under the homogeneous model's names, so every layout loads every other.

A DCP folder is trusted input: its metadata is pickled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.stateful import Stateful

from torchmoe.errors import CheckpointError

__all__ = ["ExpertOptimizer", "ExpertShards"]


class ExpertShards(Tensor):
    """Rows ``owned`` of a logical tensor [experts, ...], held in ``local`` [len(owned), ...].

    DCP reads and writes it through the protocol that DTensor implements: one chunk per run of consecutive experts. An empty
    owner has no chunk. It has the logical shape and no arithmetic: use ``local`` for that.
    """

    local: Tensor
    owned: tuple[int, ...]
    num_experts: int

    @staticmethod
    def __new__(cls, local: Tensor, owned: Sequence[int], num_experts: int) -> ExpertShards:
        if local.shape[0] != len(owned):
            raise CheckpointError(
                f"a tensor of {local.shape[0]} rows cannot hold experts {list(owned)}; give one row per owned expert"
            )
        self: ExpertShards = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, (num_experts, *local.shape[1:]), dtype=local.dtype, device=local.device
        )
        self.local, self.owned, self.num_experts = local.detach(), tuple(owned), num_experts
        return self

    def __init__(self, local: Tensor, owned: Sequence[int], num_experts: int) -> None:
        pass

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self, rest = args[0], args[1:]
        if func in (torch.ops.aten.detach.default, torch.ops.aten._to_copy.default):
            return cls(func(self.local, *rest, **(kwargs or {})), self.owned, self.num_experts)
        if func is torch.ops.aten.copy_.default and isinstance(rest[0], cls):
            self.local.copy_(rest[0].local)
            return self
        raise CheckpointError(f"{func} on a shard of a checkpoint: work on its .local tensor")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ExpertShards({list(self.owned)} of {tuple(self.shape)}, {self.dtype})"

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.local.untyped_storage()

    def runs(self) -> list[tuple[int, int, int]]:
        """(first logical expert, first local row, length) of every run of consecutive experts."""
        out: list[tuple[int, int, int]] = []
        for row, expert in enumerate(self.owned):
            if out and expert == out[-1][0] + out[-1][2]:
                out[-1] = (out[-1][0], out[-1][1], out[-1][2] + 1)
            else:
                out.append((expert, row, 1))
        return out

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        rest = self.local.shape[1:]
        zeros = [0] * len(rest)
        return [
            ChunkStorageMetadata(offsets=torch.Size([first, *zeros]), sizes=torch.Size([n, *rest])) for first, _, n in self.runs()
        ]

    def __create_write_items__(self, fqn: str, obj: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets, i),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for i, chunk in enumerate(self.__create_chunk_list__())
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for first, row, n in self.runs():
            if index.offset is not None and index.offset[0] == first:
                return self.local[row : row + n]
        raise CheckpointError(f"{index.fqn}: no chunk at {index.offset}; this rank owns experts {list(self.owned)}")


class ExpertOptimizer(Stateful):
    """An optimizer container whose per-expert states (moments) are saved like the experts themselves.

    Args:
        optimizers: torchtitan's container.
        owners: parameter name -> (owned experts, experts of the layer).
    """

    def __init__(self, optimizers: Any, owners: Mapping[str, tuple[Sequence[int], int]]) -> None:
        self.optimizers, self.owners = optimizers, owners

    def state_dict(self) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key, value in self.optimizers.state_dict().items():
            fqn = key.removeprefix("state.").rpartition(".")[0]
            if key.startswith("state.") and fqn in self.owners and isinstance(value, Tensor) and value.dim() > 0:
                value = ExpertShards(value, *self.owners[fqn])
            out[key] = value
        return out

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizers.load_state_dict({k: v.local if isinstance(v, ExpertShards) else v for k, v in state_dict.items()})
