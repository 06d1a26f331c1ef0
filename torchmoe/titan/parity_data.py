"""The global batches of the parity runs: fixed random tokens, by step, micro-batch and sequence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Tokens"]

VOCAB = 64
Batch = tuple[dict[str, Tensor], Tensor]


@dataclass(frozen=True)
class Tokens:
    """Micro-batches of sequences.

    Args:
        lengths: tokens of every sequence, per micro-batch; None is 4 micro-batches of 4 sequences of 16 tokens.
    """

    lengths: tuple[tuple[int, ...], ...] | None = None

    @property
    def equal(self) -> bool:
        return self.lengths is None

    @property
    def shape(self) -> tuple[tuple[int, ...], ...]:
        return self.lengths or ((16,) * 4,) * 4

    @property
    def num_tokens(self) -> int:
        return sum(map(sum, self.shape))

    @property
    def num_sequences(self) -> int:
        """Sequences that have tokens."""
        return sum(n > 0 for lengths in self.shape for n in lengths)

    def sequence(self, step: int, microbatch: int, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed((step * 101 + microbatch) * 101 + index)
        tokens = torch.randint(VOCAB, (self.shape[microbatch][index] + 1,), generator=generator)
        return tokens[:-1], tokens[1:]

    def _all(self, step: int, microbatch: int) -> list[tuple[Tensor, Tensor]]:
        return [self.sequence(step, microbatch, i) for i in range(len(self.shape[microbatch]))]

    def microbatches(self, step: int) -> Iterator[Batch]:
        """Global micro-batches as a disaggregated run reads them."""
        for m, lengths in enumerate(self.shape):
            inputs, labels = zip(*self._all(step, m), strict=True)
            positions = [torch.arange(n) for n in lengths]
            if self.equal:
                yield {"input": torch.stack(inputs), "positions": torch.stack(positions)}, torch.stack(labels)
            else:
                batch = {"input": torch.cat(inputs), "positions": torch.cat(positions), "lengths": torch.tensor(lengths)}
                yield batch, torch.cat(labels)

    def whole(self, step: int, rank: int, world: int) -> Iterator[Batch]:
        """The same batch as torchtitan's own path reads it: this rank's share at once, or sequence by sequence if unequal."""
        pairs = [pair for m in range(len(self.shape)) for pair in self._all(step, m)]
        if not self.equal:
            for inputs, labels in pairs:
                if len(inputs):
                    yield {"input": inputs[None], "positions": torch.arange(len(inputs))[None]}, labels[None]
            return
        mine = pairs[rank * len(pairs) // world : (rank + 1) * len(pairs) // world]
        inputs, labels = (torch.stack(t) for t in zip(*mine, strict=True))
        yield {"input": inputs, "positions": torch.arange(inputs.shape[1]).expand(len(inputs), -1).clone()}, labels
