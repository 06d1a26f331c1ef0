"""A tokenizer and a data loader for byte text, addressed by GLOBAL sequence index: every layout reads the same batch.

Sequence ``g`` of an endless stream is a fixed function of (text, seq_len, seed, g). A loader with ``dp_world_size`` W, rank r and
batch B yields, as its k-th batch, the sequences ``(k*W + r)*B ... +B``; its position is one number, whatever the layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer

from torchmoe.errors import ConfigError
from torchmoe.titan.text import load_corpus

__all__ = ["ByteTokenizer", "NoData", "Sequences", "TextDataLoader"]


class ByteTokenizer(BaseTokenizer):
    """UTF-8 bytes; 0 separates documents. Needs no file."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, *, tokenizer_path: str | None = None) -> None:
        super().__init__()
        self.bos_id = self.eos_id = 0

    def encode(self, text: str, add_bos: bool = False, add_eos: bool = False) -> list[int]:
        return [0] * add_bos + list(text.encode()) + [0] * add_eos

    def decode(self, ids: Sequence[int], **kwargs: Any) -> str:
        return bytes(i for i in ids if i).decode(errors="replace")

    def get_vocab_size(self) -> int:
        return 256


class Sequences:
    """An endless stream of ``(input, label)`` windows of a text, each epoch in its own fixed random order.

    Args:
        text: uint8 tensor.
        seq_len: tokens of one sequence.
        seed: of the orders; None keeps the order of the text.

    Raises:
        ConfigError: the text is shorter than one sequence and its label.
    """

    def __init__(self, text: Tensor, *, seq_len: int, seed: int | None, what: str = "text") -> None:
        self.text, self.seq_len, self.seed = text, seq_len, seed
        self.windows = (text.numel() - 1) // seq_len
        if self.windows < 1:
            raise ConfigError(
                f"the {what} has {text.numel()} bytes, one sequence needs {seq_len + 1}; give more text or lower training.seq_len"
            )
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.long)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        epoch, at = divmod(index, self.windows)
        if self.seed is None:
            window = at
        else:
            if epoch != self._epoch:
                generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
                self._epoch, self._order = epoch, torch.randperm(self.windows, generator=generator)
            window = int(self._order[at])
        tokens = self.text[window * self.seq_len : (window + 1) * self.seq_len + 1].long()
        return tokens[:-1], tokens[1:]


class NoData(BaseDataLoader):
    """The data loader of FFN ranks: they read nothing and have no position to save."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, **kwargs: Any) -> None:
        pass

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        return iter(())

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class TextDataLoader(BaseDataLoader):
    """Yields ``({"input": [B, S], "positions": [B, S]}, labels [B, S])``; stateful and resumable in any layout."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        folder: str | None = None
        """Folder with text files; None takes the text that every Python installation carries."""

        split: str = "train"
        """``train`` or ``held_out``."""

        seed: int = 0
        """Order of the sequences of each epoch."""

        infinite: bool = True
        """Start the next epoch at the end; else stop before a batch that would repeat a sequence."""

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: BaseTokenizer,
        seq_len: int,
        local_batch_size: int,
        **kwargs: Any,
    ) -> None:
        corpus = load_corpus(config.folder)
        text = corpus.split(config.split)
        self.corpus = corpus
        self.sequences = Sequences(
            text,
            seq_len=seq_len,
            seed=config.seed,
            what=f"{config.split} text of {corpus.name!r}",
        )
        self.infinite, self.world, self.rank, self.batch = config.infinite, dp_world_size, dp_rank, local_batch_size
        self.next = 0  # global index of the first sequence of the next round of all ranks

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        positions = torch.arange(self.sequences.seq_len).expand(self.batch, -1)
        while True:
            after = self.next + self.world * self.batch
            if not self.infinite and after > self.sequences.windows:
                return
            first = self.next + self.rank * self.batch
            pairs = [self.sequences[g] for g in range(first, first + self.batch)]
            self.next = after
            inputs, labels = (torch.stack(t) for t in zip(*pairs, strict=True))
            yield {"input": inputs, "positions": positions.clone()}, labels

    def state_dict(self) -> dict[str, Any]:
        return {"next_sequence": self.next}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict:
            self.next = int(state_dict["next_sequence"])
