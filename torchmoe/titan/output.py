"""The output folder of a run: an unfinished run resumes, a finished one is left alone and the next is NAME-2."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from torchmoe.errors import ConfigError

__all__ = ["RUN", "SUMMARY", "History", "choose_folder", "hold"]

RUN, SUMMARY, HISTORY = "run.json", "summary.json", "history.jsonl"


def choose_folder(root: Path, name: str, run: Mapping[str, Any]) -> tuple[Path, bool]:
    """(folder, whether it holds an unfinished run of the same options), created and marked with ``run``.

    A folder is finished when it has a summary, and begun when it has a history. NAME, NAME-2, NAME-3, ... are tried in order.

    Raises:
        ConfigError: the folder cannot be written, or an unfinished run there has other options.
    """
    for n in range(1, 10_000):
        folder = root / (name if n == 1 else f"{name}-{n}")
        if (folder / SUMMARY).exists():
            continue
        mark = folder / RUN
        try:
            if mark.exists() and (folder / HISTORY).exists():
                return _resume(folder, json.loads(mark.read_text()), run), True
            folder.mkdir(parents=True, exist_ok=True)
            mark.write_text(json.dumps(dict(run), indent=1, sort_keys=True))
        except OSError as e:
            raise ConfigError(
                f"output folder {str(folder)!r} cannot be written ({e.strerror}); give --output another folder"
            ) from None
        return folder, False
    raise ConfigError(f"{str(root / name)!r} and 9998 more are finished runs; give --name another name")


def _resume(folder: Path, before: Mapping[str, Any], run: Mapping[str, Any]) -> Path:
    other = sorted(k for k in {*before, *run} if before.get(k) != run.get(k))
    if other:
        key = other[0]
        raise ConfigError(
            f"{str(folder)!r} holds an unfinished run with {key}={before.get(key)!r}, this one has {run.get(key)!r}; "
            "use the same options to resume it, or give --name another name"
        )
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"output folder {str(folder)!r} cannot be written; give --output another folder")
    return folder


def hold(folder: Path, part: str = "launcher") -> IO[str]:
    """Keep the folder for this process, as long as the returned file is open. Workers may outlive a killed launcher: two parts.

    Raises:
        ConfigError: another process runs in it.
    """
    import fcntl

    lock = (folder / f".{part}.lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise ConfigError(f"{str(folder)!r} is in use by a running job; wait for it, or give --name another name") from None
    return lock


class History:
    """One JSON line a step in ``history.jsonl``; a resumed run forgets the steps after its checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / HISTORY

    def read(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        rows = []
        for line in self.path.read_text().splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                break  # the last line of a killed run
        return rows

    def start_after(self, step: int) -> None:
        """Keep the rows of steps up to ``step``."""
        self.write([r for r in self.read() if r["step"] <= step])

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self.path.write_text("".join(json.dumps(r) + "\n" for r in rows))

    def append(self, row: Mapping[str, Any]) -> None:
        with self.path.open("a") as f:
            f.write(json.dumps(row) + "\n")
