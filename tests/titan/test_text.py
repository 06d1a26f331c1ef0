"""The corpus is a fixed function of the folder, split by document, and its entropies are those of its bytes."""

from __future__ import annotations

import hashlib
import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchmoe.errors import ConfigError
from torchmoe.titan.text import byte_entropy, load_corpus


def write(folder: Path, texts: dict[str, bytes]) -> Path:
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
    return folder


def bytes_of(t: torch.Tensor) -> bytes:
    return bytes(t.tolist())


def test_every_sixteenth_document_is_held_out_in_path_order(tmp_path: Path) -> None:
    texts = {f"{i:02d}/a.txt": f"document {i}\n".encode() for i in range(33)}
    corpus = load_corpus(write(tmp_path, texts))
    ordered = [texts[n] for n in sorted(texts)]
    assert bytes_of(corpus.held_out) == b"\0".join([ordered[15], ordered[31]])
    assert bytes_of(corpus.train) == b"\0".join(t for i, t in enumerate(ordered) if i not in (15, 31))
    assert corpus.documents == 33
    assert corpus.sha256 == hashlib.sha256(bytes_of(corpus.train) + bytes_of(corpus.held_out)).hexdigest()
    assert load_corpus(tmp_path).sha256 == corpus.sha256


def test_few_documents_give_their_last_sixteenth(tmp_path: Path) -> None:
    corpus = load_corpus(write(tmp_path, {"a": b"x" * 160, "b": b"y" * 17}))
    assert bytes_of(corpus.train) == b"x" * 150 + b"\0" + b"y" * 15
    assert bytes_of(corpus.held_out) == b"x" * 10 + b"\0" + b"y" * 2


def test_hidden_binary_and_empty_files_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": b"text", ".hidden": b"no", ".git/x": b"no", "b.bin": b"\0\1", "c": b""})
    assert load_corpus(tmp_path).documents == 1


def test_the_text_of_this_python_is_there_without_a_folder() -> None:
    corpus = load_corpus()
    assert corpus.documents > 100
    assert corpus.held_out.numel() > 100_000 and corpus.train.numel() > 10 * corpus.held_out.numel()


@pytest.mark.parametrize("make, word", [(None, "does not exist"), ("file", "is a file"), ("folder", "has no text")])
def test_a_missing_or_empty_folder_is_refused(tmp_path: Path, make: str | None, word: str) -> None:
    path = tmp_path / "data"
    if make == "file":
        path.write_text("x")
    elif make == "folder":
        write(path, {".hidden": b"x"})
    with pytest.raises(ConfigError, match=word) as e:
        load_corpus(path)
    assert str(path) in str(e.value)


@settings(deadline=None, max_examples=30)
@given(st.binary(min_size=2, max_size=400))
def test_entropies_equal_their_definition(text: bytes) -> None:
    n = len(text)
    counts = {b: text.count(bytes([b])) for b in set(text)}
    unigram = -sum(c / n * math.log(c / n) for c in counts.values())
    pairs: dict[tuple[int, int], int] = {}
    for a, b in pairwise(text):
        pairs[a, b] = pairs.get((a, b), 0) + 1
    before: dict[int, int] = {}
    for (a, _), c in pairs.items():
        before[a] = before.get(a, 0) + c
    bigram = -sum(c / (n - 1) * math.log(c / before[a]) for (a, _), c in pairs.items())
    got = byte_entropy(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    assert got.unigram == pytest.approx(unigram, abs=1e-12)
    assert got.bigram == pytest.approx(bigram, abs=1e-12)
