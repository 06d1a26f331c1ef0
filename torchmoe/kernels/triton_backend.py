"""The kernels of the expert MLP in Triton: the same functions as :mod:`torchmoe.kernels.reference`, for GPUs.

Letters and contracts are the reference's. No function waits for the device: grids are upper bounds from sizes that the host
knows, and programs without work return at once. Weights may have any strides. fp32, bf16 and fp16; sums run in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchmoe.kernels import launch as host
from torchmoe.kernels.backward_hidden import backward_hidden_kernel, gate_gradient_kernel
from torchmoe.kernels.down_projection import down_projection_kernel
from torchmoe.kernels.input_grad import input_grad_kernel
from torchmoe.kernels.scheme import Halves
from torchmoe.kernels.triton_routing import build_queue, combine
from torchmoe.kernels.tuning import Config, Key, rows_bucket
from torchmoe.kernels.up_projection import up_projection_kernel
from torchmoe.kernels.weight_grad import bias_grad_kernel, reduce_slices_kernel, weight_grad_kernel

__all__ = [
    "backward_hidden",
    "bias_grad_rows",
    "build_queue",
    "combine",
    "down_projection",
    "input_grad",
    "up_projection",
    "weight_grad_rows",
]


def up_projection(
    x_TD: Tensor,
    expert_token_indices_P: Tensor,
    expert_token_offsets_E1: Tensor,
    w1_EFD: Tensor,
    w3_EFD: Tensor | None,
    b1_EF: Tensor | None,
    b3_EF: Tensor | None,
    activation: str,
    save_hidden: bool,
    gate_only: bool = False,
) -> tuple[Tensor, Halves | None]:
    """See :func:`torchmoe.kernels.reference.up_projection`; x is gathered inside the loads of one grouped GEMM."""
    E, F, D = w1_EFD.shape
    P, device, glu = expert_token_indices_P.numel(), x_TD.device, w3_EFD is not None
    host.check("up_projection", device, x_TD.dtype, w1=w1_EFD, w3=w3_EFD, b1=b1_EF, b3=b3_EF)
    halves = (2 if glu and not gate_only else 1) if save_hidden else 0
    a_PF = x_TD.new_empty(P, F)
    gate_PF = torch.empty_like(a_PF) if halves > 0 else a_PF
    up_PF = torch.empty_like(a_PF) if halves > 1 else a_PF
    w3 = w3_EFD if w3_EFD is not None else w1_EFD
    b1 = b1_EF if b1_EF is not None else w1_EFD[:, :, 0]
    b3 = b3_EF if b3_EF is not None else b1

    def start(config: Config) -> None:
        tiles_m = host.row_tiles(P, E, config.block_m)
        host.launch(
            up_projection_kernel,
            (tiles_m * -(-F // config.block_n),),
            device,
            x_ptr=x_TD,
            indices_ptr=expert_token_indices_P,
            offsets_ptr=expert_token_offsets_E1,
            w1_ptr=w1_EFD,
            w3_ptr=w3,
            b1_ptr=b1,
            b3_ptr=b3,
            a_ptr=a_PF,
            gate_ptr=gate_PF,
            up_ptr=up_PF,
            num_row_tiles=tiles_m,
            D=D,
            F=F,
            **host.strides("x", x_TD, "td"),
            **host.strides("w1", w1_EFD, "efd"),
            **host.strides("w3", w3, "efd"),
            **host.strides("b1", b1, "ef"),
            **host.strides("b3", b3, "ef"),
            E=E,
            E_POW2=host.power_of_two(E),
            ACTIVATION=activation,
            GLU=glu,
            BIAS=b1_EF is not None,
            SAVE_HALVES=halves,
            INDEX_64=host.index_64((x_TD, (0, 1)), (w1_EFD, (1, 2)), (w3, (1, 2))),
            EVEN_N=F % config.block_n == 0,
            EVEN_K=D % config.block_k == 0,
            PRECISION=host.dot_precision(x_TD.dtype),
            **_tile(config, x_TD.dtype),
            PARTS=config.parts,
        )

    host.run_gemm(_key("up_projection", F, D, E, P, x_TD), device, start)
    return a_PF, (gate_PF, up_PF if halves > 1 else None) if save_hidden else None


def down_projection(a_PF: Tensor, expert_token_offsets_E1: Tensor, w2_EDF: Tensor, b2_ED: Tensor | None) -> Tensor:
    """See :func:`torchmoe.kernels.reference.down_projection`."""
    E, D, F = w2_EDF.shape
    P, device = a_PF.size(0), a_PF.device
    host.check("down_projection", device, a_PF.dtype, w2=w2_EDF, b2=b2_ED)
    y_PD = a_PF.new_empty(P, D)
    a_PF = a_PF.contiguous()
    b2 = b2_ED if b2_ED is not None else w2_EDF[:, :, 0]

    def start(config: Config) -> None:
        tiles_m = host.row_tiles(P, E, config.block_m)
        host.launch(
            down_projection_kernel,
            (tiles_m * -(-D // config.block_n),),
            device,
            a_ptr=a_PF,
            offsets_ptr=expert_token_offsets_E1,
            w2_ptr=w2_EDF,
            b2_ptr=b2,
            y_ptr=y_PD,
            num_row_tiles=tiles_m,
            D=D,
            F=F,
            **host.strides("w2", w2_EDF, "edf"),
            **host.strides("b2", b2, "ed"),
            E=E,
            E_POW2=host.power_of_two(E),
            BIAS=b2_ED is not None,
            INDEX_64=host.index_64((w2_EDF, (1, 2))),
            EVEN_N=D % config.block_n == 0,
            EVEN_K=F % config.block_k == 0,
            PRECISION=host.dot_precision(a_PF.dtype),
            **_tile(config, a_PF.dtype),
        )

    host.run_gemm(_key("down_projection", D, F, E, P, a_PF), device, start)
    return y_PD


def backward_hidden(
    dy_TD: Tensor,
    expert_token_indices_P: Tensor,
    expert_token_offsets_E1: Tensor,
    gates_P: Tensor,
    h: Halves,
    w2_EDF: Tensor,
    b2_ED: Tensor | None,
    activation: str,
    a_PF: Tensor | None = None,
) -> tuple[Halves, Tensor, Tensor]:
    """See :func:`torchmoe.kernels.reference.backward_hidden`; one grouped GEMM whose epilogue gives all three."""
    E, D, F = w2_EDF.shape
    P, device = expert_token_indices_P.numel(), dy_TD.device
    gate_PF, up_PF = h
    host.check("backward_hidden", device, dy_TD.dtype, gate=gate_PF, up=up_PF, w2=w2_EDF, b2=b2_ED, a=a_PF)
    glu = up_PF is not None
    up = up_PF if up_PF is not None else gate_PF
    gate_PF, up = _unit_columns(gate_PF), _unit_columns(up)
    ag_PF = dy_TD.new_empty(P, F)
    dgate_PF = torch.empty_like(ag_PF)
    dup_PF = torch.empty_like(ag_PF) if glu else None
    dgates_P = torch.empty(P, dtype=torch.float32, device=device)
    scale_P = gates_P.to(torch.float32).contiguous()
    saved_a = a_PF.contiguous() if a_PF is not None else ag_PF
    e_pow2 = host.power_of_two(E)
    column_tiles: list[tuple[int, Tensor]] = []

    def start(config: Config) -> None:
        tiles_m, tiles_n = host.row_tiles(P, E, config.block_m), -(-F // config.block_n)
        partials = torch.empty(P, tiles_n, dtype=torch.float32, device=device)
        column_tiles[:] = [(tiles_n, partials)]
        host.launch(
            backward_hidden_kernel,
            (tiles_m * tiles_n,),
            device,
            dy_ptr=dy_TD,
            indices_ptr=expert_token_indices_P,
            offsets_ptr=expert_token_offsets_E1,
            gates_ptr=scale_P,
            h1_ptr=gate_PF,
            h3_ptr=up,
            a_ptr=saved_a,
            w2_ptr=w2_EDF,
            dh1_ptr=dgate_PF,
            dh3_ptr=dup_PF if dup_PF is not None else dgate_PF,
            ag_ptr=ag_PF,
            partials_ptr=partials,
            num_row_tiles=tiles_m,
            D=D,
            F=F,
            **host.strides("y", dy_TD, "td"),
            stride_h1=gate_PF.stride(0),
            stride_h3=up.stride(0),
            **host.strides("w2", w2_EDF, "edf"),
            E=E,
            E_POW2=e_pow2,
            ACTIVATION=activation,
            GLU=glu,
            SAVED_A=a_PF is not None,
            INDEX_64=host.index_64((dy_TD, (0, 1)), (w2_EDF, (1, 2))),
            EVEN_N=F % config.block_n == 0,
            EVEN_K=D % config.block_k == 0,
            PRECISION=host.dot_precision(dy_TD.dtype),
            **_tile(config, dy_TD.dtype),
            PARTS=config.parts,
        )

    host.run_gemm(_key("backward_hidden", F, D, E, P, dy_TD), device, start)
    tiles_n, partials = column_tiles[0]
    b2 = b2_ED if b2_ED is not None else w2_EDF[:, :, 0]
    block_m = 16 if b2_ED is not None else 128
    tiles_m = host.row_tiles(P, E, block_m)
    host.launch(
        gate_gradient_kernel,
        (tiles_m,),
        device,
        partials_ptr=partials,
        dy_ptr=dy_TD,
        indices_ptr=expert_token_indices_P,
        offsets_ptr=expert_token_offsets_E1,
        b2_ptr=b2,
        dgates_ptr=dgates_P,
        D=D,
        N=tiles_n,
        **host.strides("y", dy_TD, "td"),
        **host.strides("b2", b2, "ed"),
        E=E,
        E_POW2=e_pow2,
        BIAS=b2_ED is not None,
        INDEX_64=host.index_64((dy_TD, (0, 1))),
        BLOCK_M=block_m,
        BLOCK_D=min(host.power_of_two(D), 256),
        num_warps=4,
    )
    return (dgate_PF, dup_PF), ag_PF, dgates_P


def input_grad(dh: Halves, expert_token_offsets_E1: Tensor, w1_EFD: Tensor, w3_EFD: Tensor | None) -> Tensor:
    """See :func:`torchmoe.kernels.reference.input_grad`."""
    E, F, D = w1_EFD.shape
    dgate_PF = dh[0].contiguous()
    dup_PF = dgate_PF if dh[1] is None else dh[1].contiguous()
    P, device, dtype = dgate_PF.size(0), dgate_PF.device, dgate_PF.dtype
    host.check("input_grad", device, dtype, w1=w1_EFD, w3=w3_EFD, up=dup_PF)
    dxr_PD = dgate_PF.new_empty(P, D)
    w3 = w3_EFD if w3_EFD is not None else w1_EFD

    def start(config: Config) -> None:
        tiles_m = host.row_tiles(P, E, config.block_m)
        host.launch(
            input_grad_kernel,
            (tiles_m * -(-D // config.block_n),),
            device,
            dh1_ptr=dgate_PF,
            dh3_ptr=dup_PF,
            offsets_ptr=expert_token_offsets_E1,
            w1_ptr=w1_EFD,
            w3_ptr=w3,
            dxr_ptr=dxr_PD,
            num_row_tiles=tiles_m,
            D=D,
            F=F,
            **host.strides("w1", w1_EFD, "efd"),
            **host.strides("w3", w3, "efd"),
            E=E,
            E_POW2=host.power_of_two(E),
            GLU=w3_EFD is not None,
            INDEX_64=host.index_64((w1_EFD, (1, 2)), (w3, (1, 2))),
            EVEN_N=D % config.block_n == 0,
            EVEN_K=F % config.block_k == 0,
            PRECISION=host.dot_precision(dtype),
            **_tile(config, dtype),
        )

    host.run_gemm(_key("input_grad", D, F, E, P, dgate_PF), device, start)
    return dxr_PD


def weight_grad_rows(
    left: Tensor,
    right: Tensor,
    left_indices_P: Tensor | None,
    right_indices_P: Tensor | None,
    expert_token_offsets_E1: Tensor,
    out: Tensor,
    accumulate: bool = True,
    slice_rows: int | None = None,
) -> Tensor:
    """See :func:`torchmoe.kernels.reference.weight_grad_rows`; rows are gathered in the reduction of one grouped GEMM.

    Args:
        slice_rows: cut an expert's reduction after this many rows; None leaves the choice to the shapes (a cut only where
            a single expert with all rows would leave the device idle).
    """
    E, M, N = out.shape
    device = left.device
    host.check("weight_grad_rows", device, left.dtype, right=right)
    P = left.size(0) if left_indices_P is None else left_indices_P.numel()
    index = expert_token_offsets_E1  # stands in for an index list that is not read
    # Rows in place are walked by a 64-bit base; only gathered ones need a wide offset of their own.
    wide = host.index_64((left, (1,) if left_indices_P is None else (0, 1)), (right, (1,) if right_indices_P is None else (0, 1)))

    def start_into(target: Tensor, config: Config) -> None:
        tiles = -(-M // config.block_m) * -(-N // config.block_n)
        cut = slice_rows if slice_rows is not None else host.split_rows(P, tiles, device)
        split_experts, slices = host.split_slices(P, cut)
        partials = torch.empty(slices, M, N, dtype=torch.float32, device=device)
        shared = {
            "offsets_ptr": expert_token_offsets_E1,
            "out_ptr": target,
            "partials_ptr": partials if slices else target,
            "slice_rows": cut,
            "M": M,
            "N": N,
            **host.strides("o", target, "emn"),
            "E": E,
            "E_POW2": host.power_of_two(E),
            "ACCUMULATE": accumulate,
            "INDEX_64": wide or host.index_64((target, (1, 2))),
        }
        host.launch(
            weight_grad_kernel,
            ((E + slices if slices else E) * tiles,),
            device,
            left_ptr=left,
            right_ptr=right,
            left_indices_ptr=left_indices_P if left_indices_P is not None else index,
            right_indices_ptr=right_indices_P if right_indices_P is not None else index,
            **host.strides("l", left, "pm"),
            **host.strides("r", right, "pn"),
            GATHER_LEFT=left_indices_P is not None,
            GATHER_RIGHT=right_indices_P is not None,
            SPLIT=slices > 0,
            EVEN_M=M % config.block_m == 0,
            EVEN_N=N % config.block_n == 0,
            PRECISION=host.dot_precision(left.dtype),
            **shared,
            **_tile(config, left.dtype),
            PARTS=config.parts,
        )
        if slices:
            grid = (split_experts, -(-M // 16), -(-N // 128))
            host.launch(reduce_slices_kernel, grid, device, **shared, BLOCK_M=16, BLOCK_N=128, num_warps=4)

    def rehearse(config: Config) -> None:
        start_into(torch.empty_like(out), config)

    host.run_gemm(
        _key("weight_grad", M, N, E, P, left), device, lambda config: start_into(out, config), rehearse if accumulate else None
    )
    return out


def bias_grad_rows(
    rows: Tensor,
    indices_P: Tensor | None,
    scale_P: Tensor | None,
    expert_token_offsets_E1: Tensor,
    out: Tensor,
    accumulate: bool = True,
) -> Tensor:
    """See :func:`torchmoe.kernels.reference.bias_grad_rows`."""
    E, C = out.shape
    host.check("bias_grad_rows", rows.device, rows.dtype)
    block_c = 64
    host.launch(
        bias_grad_kernel,
        (E, -(-C // block_c)),
        rows.device,
        rows_ptr=rows,
        indices_ptr=indices_P if indices_P is not None else expert_token_offsets_E1,
        scale_ptr=scale_P.to(torch.float32).contiguous() if scale_P is not None else expert_token_offsets_E1,
        offsets_ptr=expert_token_offsets_E1,
        out_ptr=out,
        C=C,
        **host.strides("r", rows, "pc"),
        **host.strides("o", out, "ec"),
        GATHER=indices_P is not None,
        SCALED=scale_P is not None,
        ACCUMULATE=accumulate,
        INDEX_64=host.index_64((rows, (1,))),
        BLOCK_R=32,
        BLOCK_C=block_c,
        num_warps=4,
    )
    return out


def _key(kernel: str, left: int, right: int, num_experts: int, rows: int, like: Tensor) -> Key:
    return Key(kernel, left, right, num_experts, like.element_size(), rows_bucket(rows, num_experts))


def _tile(config: Config, dtype: torch.dtype) -> dict[str, int | bool]:
    """The configuration as kernel arguments.

    Half precision runs without contraction to fused multiply-adds, so that A has the same bits in the up-projection and in
    the epilogue of the backward pass. Exact fp32 products are such multiply-adds themselves and need it.
    """
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP_M": config.group_m,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "enable_fp_fusion": dtype == torch.float32,
    }


def _unit_columns(rows: Tensor) -> Tensor:
    return rows if rows.stride(1) == 1 else rows.contiguous()
