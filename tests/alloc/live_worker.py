"""Under torchrun: one step of a recipe with every tensor storage counted while it lives. Writes JSON per rank.

Arguments: recipe module, function, folder, then torchtitan options.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import weakref
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operations have made and that still live; ``peak`` of them."""

    def __init__(self, known: set[int]) -> None:
        super().__init__()
        self.known, self.now, self.peak = known, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.device.type == "cpu":
                self.see(t)
        return out

    def see(self, t: torch.Tensor) -> None:
        try:
            storage = t.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return  # a wrapper without a storage of its own; what it wraps is seen by itself
        address, size = storage.data_ptr(), storage.nbytes()
        if not address or address in self.known:
            return
        self.known.add(address)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self.gone, address, size)

    def gone(self, address: int, size: int) -> None:
        if address in self.known:
            self.known.discard(address)
            self.now -= size


def live_storages() -> dict[int, int]:
    """Address -> bytes of every storage that a tensor holds now."""
    found = {}
    for o in gc.get_objects():
        if isinstance(o, torch.Tensor) and o.device.type == "cpu":
            try:
                s = o.untyped_storage()
            except (NotImplementedError, RuntimeError):
                continue
            found[s.data_ptr()] = s.nbytes()
    return found


def main() -> None:
    module, function, folder, *options = sys.argv[1:]
    from torchmoe.experts import RankExperts
    from torchmoe.titan.recipe import load_recipe

    forward_saved, loads = RankExperts.forward_saved, []

    def counted(self: RankExperts, rows_RD: torch.Tensor, ids_RK: torch.Tensor, gates_RK: torch.Tensor) -> Any:
        loads.append((rows_RD.size(0), int((self.local_ids(ids_RK) >= 0).sum())))
        return forward_saved(self, rows_RD, ids_RK, gates_RK)

    trainer = load_recipe(module, function, options).build()
    step = trainer.train_step
    result: dict[str, Any] = {}

    def measured(iterator: Any) -> Any:
        if trainer.step < 2:  # the first step makes the optimizer's state
            return step(iterator)
        gc.collect()
        RankExperts.forward_saved = counted  # type: ignore[method-assign]
        before = live_storages()
        with LiveBytes(set(before)) as mode:
            out = step(iterator)
        state = [p for part in trainer.model_parts for p in part.parameters()]
        for optimizer in trainer.optimizers:
            state += [t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor) and t.dim()]
        result.update(state=sum(t.numel() * t.element_size() for t in state), peak=mode.peak, loads=loads)
        return out

    trainer.train_step = measured
    trainer.train()
    trainer.close()
    Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
