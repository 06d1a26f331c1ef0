"""A mixture of experts on one device, in an ordinary training loop: python examples/single_device.py"""

import torch

from torchmoe import FusedExpertMLP, MoELayer, TopKRouter


def train(steps: int = 50) -> list[float]:
    """Fit a random target; returns the loss of every step."""
    torch.manual_seed(0)
    layer = MoELayer(TopKRouter(32, 8, 2, normalize=True, sequence_loss=0.01), FusedExpertMLP(8, 32, 64))
    x, target = torch.randn(256, 32), torch.randn(256, 32)
    optimizer, history = torch.optim.AdamW(layer.parameters(), lr=1e-2), list[float]()
    for _ in range(steps):
        y, routing = layer(x)
        loss = (y - target).square().mean()
        (loss if routing.aux is None else loss + routing.aux).backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append(loss.item())
    return history


if __name__ == "__main__":
    losses = train()
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
