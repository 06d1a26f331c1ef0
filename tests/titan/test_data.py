"""Every layout reads the same global batch, and a resumed loader reads what it would have read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchmoe.errors import ConfigError
from torchmoe.titan.shims import ensure

ensure()

from torchmoe.titan.data import ByteTokenizer, Sequences, TextDataLoader  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text")
    (path / "a.txt").write_text("".join(f"line {i} of a text that is long enough\n" for i in range(60)))
    return path


def loader(folder: Path, world: int = 1, rank: int = 0, batch: int = 4, **kw: object) -> TextDataLoader:
    config = TextDataLoader.Config(folder=str(folder), **kw)
    return config.build(dp_world_size=world, dp_rank=rank, tokenizer=None, seq_len=16, local_batch_size=batch)


def take(source: TextDataLoader, n: int) -> list[torch.Tensor]:
    iterator = iter(source)
    out = []
    for _ in range(n):
        inputs, labels = next(iterator)
        assert torch.equal(inputs["input"][:, 1:], labels[:, :-1])
        assert torch.equal(inputs["positions"], torch.arange(16).expand(len(labels), -1))
        out.append(inputs["input"])
    return out


@pytest.mark.parametrize("world, batch", [(1, 24), (2, 12), (3, 8), (6, 4)])
def test_every_data_parallel_layout_reads_the_same_global_batch(folder: Path, world: int, batch: int) -> None:
    one = torch.cat(take(loader(folder, batch=4), 36))  # what micro-batches of 4 read in six steps
    ranks = [take(loader(folder, world, r, batch), 6) for r in range(world)]
    got = torch.cat([ranks[r][k] for k in range(6) for r in range(world)])
    assert torch.equal(got, one)


@settings(deadline=None, max_examples=20)
@given(before=st.integers(0, 40), batch=st.integers(1, 7))
def test_a_resumed_loader_continues_where_the_other_stopped(folder: Path, before: int, batch: int) -> None:
    whole = loader(folder, batch=batch)
    want = take(whole, before + 3)[before:]
    first = loader(folder, batch=batch)
    take(first, before)
    second = loader(folder, batch=batch)
    second.load_state_dict(first.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(take(second, 3), want, strict=True))


def test_an_epoch_visits_every_window_once_and_the_next_one_in_another_order() -> None:
    text = torch.arange(16 * 9 + 1, dtype=torch.uint8)
    s = Sequences(text, seq_len=16, seed=3)
    epochs = [[int(s[e * s.windows + i][0][0]) for i in range(s.windows)] for e in range(2)]
    assert s.windows == 9
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(0, 144, 16))
    assert epochs[0] != epochs[1]


def test_a_finite_loader_stops_before_it_repeats(folder: Path) -> None:
    source = loader(folder, batch=5, infinite=False)
    batches = list(source)
    assert len(batches) == source.sequences.windows // 5


def test_a_text_shorter_than_a_sequence_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("short text")
    with pytest.raises(ConfigError, match=r"has 9 bytes, one sequence needs 17"):
        loader(tmp_path)


def test_byte_tokens_round_trip() -> None:
    tokenizer = ByteTokenizer.Config().build(tokenizer_path=None)
    text = "naïve – text 漢字\n"
    ids = tokenizer.encode(text, add_bos=True, add_eos=True)
    assert ids[0] == ids[-1] == 0 and max(ids) < tokenizer.get_vocab_size() == 256
    assert tokenizer.decode(ids) == text
