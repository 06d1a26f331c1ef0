"""Text to train on: a folder of the user's, or what every Python installation carries. Bytes, in one fixed order."""

from __future__ import annotations

import hashlib
import math
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from torchmoe.errors import ConfigError

__all__ = ["Corpus", "Entropy", "byte_entropy", "check_folder", "load_corpus"]

SEPARATOR = b"\0"  # between documents; files that contain it are taken for binaries and left out
HELD_OUT = 16  # one document in this many is held out
_SKIP = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "turtledemo",
    "encodings",
    "pydoc_data",
    "__pycache__",
}


@dataclass(frozen=True)
class Corpus:
    """Documents as bytes, split by document.

    Args:
        name: where the text is from.
        train, held_out: uint8 tensors, documents joined by a zero byte.
        documents: number of documents in both.
        sha256: of ``train`` then ``held_out``.
    """

    name: str
    train: Tensor
    held_out: Tensor
    documents: int
    sha256: str

    @property
    def num_bytes(self) -> int:
        return self.train.numel() + self.held_out.numel()

    def split(self, name: str) -> Tensor:
        if name not in ("train", "held_out"):
            raise ConfigError(f"split {name!r} is unknown; use 'train' or 'held_out'")
        return self.train if name == "train" else self.held_out


@dataclass(frozen=True)
class Entropy:
    """Nats per byte: of single bytes, and of a byte given the one before it."""

    unigram: float
    bigram: float


def byte_entropy(text: Tensor) -> Entropy:
    """Empirical H(b) and H(b | previous byte) of a uint8 tensor: no unigram (bigram) model predicts this text better."""

    def entropy(ids: Tensor, size: int) -> float:
        counts = torch.bincount(ids, minlength=size).double()
        p = counts[counts > 0] / counts.sum()
        return float(-(p * p.log()).sum())

    ids = text.long()
    if ids.numel() < 2:
        return Entropy(0.0, 0.0)
    joint = entropy(ids[:-1] * 256 + ids[1:], 65536)
    return Entropy(entropy(ids, 256), joint - entropy(ids[:-1], 256))


def check_folder(folder: str | Path) -> Path:
    """The folder as a path.

    Raises:
        ConfigError: it does not exist, or is a file.
    """
    path = Path(folder).expanduser()
    if not path.exists():
        raise ConfigError(f"data folder {str(folder)!r} does not exist; give --data a folder with text files")
    if not path.is_dir():
        raise ConfigError(f"data folder {str(folder)!r} is a file; give --data the folder that contains it")
    return path


def _read(paths: list[tuple[str, Path]]) -> Iterator[tuple[str, bytes]]:
    for name, path in paths:
        try:
            data = path.read_bytes()
        except OSError:
            continue
        if data and SEPARATOR not in data:
            yield name, data


def _folder_documents(folder: Path) -> list[tuple[str, bytes]]:
    paths = [
        (p.relative_to(folder).as_posix(), p)
        for p in folder.rglob("*")
        if p.is_file() and not any(part.startswith(".") for part in p.relative_to(folder).parts)
    ]
    return list(_read(sorted(paths)))


def _python_documents() -> list[tuple[str, bytes]]:
    from pydoc_data.topics import topics

    documents = [(f"topics/{name}", text.encode()) for name, text in sorted(topics.items()) if text]
    library = Path(sysconfig.get_path("stdlib"))
    paths = [
        (p.relative_to(library).as_posix(), p)
        for p in library.rglob("*.py")
        if not _SKIP.intersection(p.relative_to(library).parts) and not p.name.startswith("_sysconfigdata")
    ]
    return documents + list(_read(sorted(paths)))


def load_corpus(folder: str | Path | None = None) -> Corpus:
    """Read the text and split it: every 16th document is held out; with fewer documents, the last 16th of each one.

    Args:
        folder: text files, taken recursively in the order of their relative paths. Hidden and binary files are left out.
            None reads the texts of ``help()`` and the sources of the standard library of this Python.

    Raises:
        ConfigError: the folder does not exist, is a file, or holds no text.
    """
    if folder is None:
        name, documents = "python", _python_documents()
    else:
        path = check_folder(folder)
        name, documents = str(path), _folder_documents(path)
        if not documents:
            raise ConfigError(
                f"data folder {str(folder)!r} has no text file (hidden and binary files are left out); put text into it"
            )
    train: list[bytes] = []
    held_out: list[bytes] = []
    if len(documents) >= HELD_OUT:
        for i, (_, text) in enumerate(documents):
            (held_out if i % HELD_OUT == HELD_OUT - 1 else train).append(text)
    else:
        for _, text in documents:
            cut = len(text) - math.ceil(len(text) / HELD_OUT)
            train.append(text[:cut])
            held_out.append(text[cut:])
    blobs = [SEPARATOR.join(t for t in part if t) for part in (train, held_out)]
    digest = hashlib.sha256(blobs[0] + blobs[1]).hexdigest()
    tensors = [torch.frombuffer(bytearray(b), dtype=torch.uint8) if b else torch.empty(0, dtype=torch.uint8) for b in blobs]
    return Corpus(name, tensors[0], tensors[1], len(documents), digest)
