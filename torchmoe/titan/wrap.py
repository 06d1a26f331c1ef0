"""What torchtitan wraps around the blocks of an attention rank: activation checkpointing, torch.compile, FSDP2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.distributed.compile import apply_compile
from torchtitan.distributed.fsdp import get_fsdp_reshard_after_forward_policy

from torchmoe.recompute import save_routing

__all__ = ["Wrapping"]


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


@dataclass(frozen=True, kw_only=True)
class Wrapping:
    """Wraps the part of an attention rank, in torchtitan's order.

    Args:
        parallel_dims: this rank's view of the run.
        training, parallelism, compile_config, ac_config: sections of the recipe; ``ac_config`` None keeps all activations.
        dump_folder: where a policy may write.
        mesh: the ranks that share the weights, which then hold shards of them; None: this rank holds them all.
        sum_gradients: the wire has no pre-multiplied sum (gloo).
    """

    parallel_dims: Any
    training: Any
    parallelism: Any
    compile_config: Any
    ac_config: Any
    dump_folder: str
    mesh: DeviceMesh | None
    sum_gradients: bool

    def __call__(self, part: Any) -> None:
        if self.ac_config is not None:
            self._checkpoint(part)
        if self.compile_config.enable and "model" in self.compile_config.components:
            apply_compile(part, compile_config=self.compile_config, parallel_dims=self.parallel_dims)
        if self.mesh is not None:
            self._shard(part, self.mesh)

    def _checkpoint(self, part: nn.Module) -> None:
        """Selective policies save top-k by themselves; the full one gets torchmoe's rule for it."""
        config = self.ac_config
        full = type(config) is FullAC.Config
        policy = _FullAC(config, self.dump_folder) if full else config.build(dump_folder=self.dump_folder)
        policy.apply(part)

    def _shard(self, part: Any, mesh: DeviceMesh) -> None:
        """FSDP2 on every module that a stage calls. The part itself is never called, so each of them is a root."""
        policy = MixedPrecisionPolicy(
            param_dtype=TORCH_DTYPE_MAP[self.training.mixed_precision_param],
            reduce_dtype=TORCH_DTYPE_MAP[self.training.mixed_precision_reduce],
            cast_forward_inputs=False,
        )
        reshard = get_fsdp_reshard_after_forward_policy(self.parallelism.fsdp_reshard_after_forward, pp_enabled=True)
        for module in (part.tok_embeddings, *part.layers.values(), part.norm, part.lm_head):
            if module is None:
                continue
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
            module.set_gradient_divide_factor(1.0)  # losses are divided by the tokens of the whole step
            if self.sum_gradients:
                module.set_force_sum_reduction_for_comms(True)
