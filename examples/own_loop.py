"""Two attention ranks and one expert rank train one model: torchrun --nproc-per-node 3 examples/own_loop.py"""

import pydoc_data.topics as topics

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import torchmoe as tm
from torchmoe.comm.gradients import clip_by_global_norm, counts_in_norm, sum_gradients

LAYERS, DIM, EXPERTS, TOP_K, HIDDEN, SEQ, SEQUENCES, MICROBATCHES = 2, 64, 8, 2, 64, 64, 4, 4


class Attention(nn.Module):
    """An attention stage: h = res + attention(norm(res)); x = norm(h); the router decides where x goes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.ffn_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.router = tm.TopKRouter(DIM, EXPERTS, TOP_K, normalize=True)

    def forward(self, res_TD: Tensor, mb: tm.MicroBatch) -> tm.AttentionOutput:
        q, k, v = self.qkv(self.norm(res_TD)).view(-1, SEQ, 3, 4, DIM // 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        h_TD = res_TD + self.out(mixed.reshape(-1, DIM))
        return tm.AttentionOutput(h_TD, x_TD := self.ffn_norm(h_TD), self.router(x_TD))


def train(steps: int = 60) -> list[float]:
    """Train; on attention ranks, the loss of every step in nats per byte."""
    pl = tm.Placement(attention=[2], ffn=[1], num_layers=LAYERS, num_experts=EXPERTS)
    pl.check_world(dist.get_world_size())
    where = pl.where(dist.get_rank())
    exchange = tm.M2NExchange(pl, tm.C10dTransport.create(pl.communicators("local")), dim=DIM, top_k=TOP_K)
    attention_group = dist.new_group(list(pl.attention_gradient_ranks(pl.head_group)))
    if where.role == "attention":
        embed, norm, head = nn.Embedding(256, DIM), nn.RMSNorm(DIM), nn.Linear(DIM, 256, bias=False)
        layers = [Attention() for _ in range(LAYERS)]

        def loss(res_TD: Tensor, mb: tm.MicroBatch) -> Tensor:
            # divided by the whole step's tokens: ranks and micro-batches add up
            return F.cross_entropy(head(norm(res_TD)), mb.target.flatten(), reduction="sum") / (MICROBATCHES * SEQUENCES * SEQ)

        model = nn.ModuleList([embed, norm, head, *layers])
        stages = tm.Stages(dict(enumerate(layers)), embedding=lambda mb: embed(mb.inputs[0]).flatten(0, 1), head=loss)
    else:
        mine = [pl.local_experts(layer, where.index) for layer in range(LAYERS)]
        mlps = [tm.FusedExpertMLP(len(ids), DIM, HIDDEN) for ids in mine]
        model = nn.ModuleList(mlps)
        stages = tm.Stages(experts={i: tm.RankExperts(mlp, mine[i], EXPERTS) for i, mlp in enumerate(mlps)})
    runner = tm.Runner(pl, tm.lower(tm.AFPipeSchedule(pl, MICROBATCHES), pl), stages=stages, exchange=exchange)
    optimizer, history = torch.optim.AdamW(model.parameters(), lr=5e-3), list[float]()
    text = torch.tensor(list("".join(topics.topics.values()).encode()))
    for step in range(steps):
        losses = list[Tensor]()
        if where.role == "attention":  # all draw one global batch, each keeps its own sequences
            start = torch.randint(len(text) - SEQ, (MICROBATCHES, SEQUENCES, 1), generator=torch.Generator().manual_seed(step))
            own = text[start + torch.arange(SEQ + 1)][:, list(pl.sequences(where.group, where.index, SEQUENCES))]
            runner.step(arg_mbs=[(b[:, :-1],) for b in own], target_mbs=[b[:, 1:] for b in own], losses=losses)
            sum_gradients(model.parameters(), attention_group)
            dist.all_reduce(total := torch.stack(losses).sum(), group=attention_group)
            history.append(float(total))
        else:
            runner.step()
        clip_by_global_norm(model.parameters(), 1.0, counted=counts_in_norm(pl, dist.get_rank()))
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {history[-1]:.3f}", flush=True)
    return history


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    train()
    dist.destroy_process_group()
