"""torchtitan's activation checkpointing of an attention rank's blocks, with routing decided once."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torchtitan.distributed.activation_checkpoint import FullAC

from torchmoe.recompute import save_routing

__all__ = ["checkpoint_blocks"]


class _FullAC(FullAC):
    """Recompute the whole attention half, but not the choice of experts: near-ties could fall the other way."""

    def _wrap_block(self, module: nn.Module, *, base_fqn: str | None = None) -> nn.Module:
        config = self.config
        return checkpoint_wrapper(  # type: ignore[no-any-return, no-untyped-call]
            module,
            context_fn=save_routing,
            preserve_rng_state=config.preserve_rng_state,
            determinism_check=config.determinism_check,
            early_stop=False,
            debug=config.debug,
        )


def checkpoint_blocks(part: nn.Module, config: Any, *, dump_folder: str) -> None:
    """Wrap every block of ``part.layers`` by torchtitan's policy ``config``.

    Selective policies save top-k by themselves; the full one gets torchmoe's rule for it.
    """
    policy = _FullAC(config, dump_folder) if type(config) is FullAC.Config else config.build(dump_folder=dump_folder)
    policy.apply(part)
