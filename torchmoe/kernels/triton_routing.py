"""The Triton backend's functions of routing: the queue, and the sum of rows per token. No function waits for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from torchmoe.kernels import launch as host
from torchmoe.kernels.combine import combine_kernel
from torchmoe.kernels.queue import count_pairs_kernel, place_pairs_kernel, scan_columns_kernel

__all__ = ["build_queue", "combine"]


def build_queue(expert_ids_TK: Tensor, num_experts: int, max_rows: int | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See :func:`torchmoe.kernels.reference.build_queue`; three kernels, no sort, no atomics on memory."""
    T, K = expert_ids_TK.shape
    device, pairs, E = expert_ids_TK.device, expert_ids_TK.numel(), num_experts
    P = pairs if max_rows is None else max_rows
    # A wider tile for many experts keeps the [tiles, E] counts small; the comparison within a tile grows with its square.
    tile = 256 if E <= 256 else 512
    tiles = -(-pairs // tile)
    counts = torch.empty(tiles, E, dtype=torch.int32, device=device)
    totals = torch.empty(E, dtype=torch.int32, device=device)
    indices_P = torch.empty(P, dtype=torch.int32, device=device)
    offsets_E1 = torch.empty(E + 1, dtype=torch.int32, device=device)
    map_TK = torch.empty(T, K, dtype=torch.int32, device=device)
    overflowed = torch.empty(1, dtype=torch.bool, device=device)
    ids = expert_ids_TK.reshape(-1)
    # Twice the bins and pairs need twice the registers.
    shared = {"E": E, "BINS": host.power_of_two(E + 1), "TILE": tile, "num_warps": 4 if E <= 256 else 8}
    host.launch(count_pairs_kernel, (tiles,), device, ids_ptr=ids, counts_ptr=counts, num_pairs=pairs, **shared)
    # Always 16 columns: one shape of tile, the one that the compile gate checks for all E.
    block_e = 16
    host.launch(
        scan_columns_kernel,
        (-(-E // block_e),),
        device,
        counts_ptr=counts,
        totals_ptr=totals,
        num_tiles=tiles,
        E=E,
        BLOCK_T=128,
        BLOCK_E=block_e,
        num_warps=4,
    )
    host.launch(
        place_pairs_kernel,
        (max(tiles, -(-P // tile), 1),),
        device,
        ids_ptr=ids,
        starts_ptr=counts,
        totals_ptr=totals,
        indices_ptr=indices_P,
        offsets_ptr=offsets_E1,
        map_ptr=map_TK,
        overflowed_ptr=overflowed,
        num_pairs=pairs,
        num_rows=P,
        K=max(K, 1),
        CHUNK=16,
        **shared,
    )
    return indices_P, offsets_E1, map_TK, overflowed


def combine(y_PD: Tensor, token_index_map: Tensor, gates: Tensor | None, token_offsets_T1: Tensor | None = None) -> Tensor:
    """See :func:`torchmoe.kernels.reference.combine`; every token gathers its own rows."""
    D, device, ragged = y_PD.size(1), y_PD.device, token_offsets_T1 is not None
    host.check("combine", device, y_PD.dtype)
    T = token_offsets_T1.numel() - 1 if token_offsets_T1 is not None else token_index_map.size(0)
    out_TD = y_PD.new_empty(T, D)
    gate = gates if gates is not None else token_index_map
    block_d = min(host.power_of_two(D), 16 * 1024 // max(y_PD.element_size(), 2) // 8)
    host.launch(
        combine_kernel,
        (T, -(-D // block_d)),
        device,
        rows_ptr=y_PD,
        map_ptr=token_index_map,
        gates_ptr=gate,
        token_offsets_ptr=token_offsets_T1 if token_offsets_T1 is not None else token_index_map,
        y_ptr=out_TD,
        D=D,
        stride_rp=y_PD.stride(0),
        stride_rd=y_PD.stride(1),
        stride_mt=0 if ragged else token_index_map.stride(0),
        stride_mk=token_index_map.stride(-1),
        stride_gt=0 if ragged else gate.stride(0),
        stride_gk=gate.stride(-1),
        K=1 if ragged else token_index_map.size(1),
        GATED=gates is not None,
        RAGGED=ragged,
        INDEX_64=host.index_64((y_PD, (1,))),
        BLOCK_D=block_d,
        num_warps=4,
    )
    return out_TD
