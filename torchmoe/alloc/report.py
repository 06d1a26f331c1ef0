"""Tables and progress for the terminal; rich where it is installed, plain text elsewhere and in pipes."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from types import TracebackType

__all__ = ["Progress", "print_table"]


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns aligned; numbers to the right."""
    if sys.stdout.isatty():
        try:
            from rich.console import Console
            from rich.table import Table
        except ImportError:
            pass
        else:
            table = Table(box=None, header_style="bold", pad_edge=False)
            for i, name in enumerate(header):
                table.add_column(name, justify="right" if _numeric(rows, i) else "left", overflow="fold")
            for row in rows:
                table.add_row(*row)
            Console().print(table)
            return
    widths = [max(len(str(r[i])) for r in [header, *rows]) for i in range(len(header))]
    right = [_numeric(rows, i) for i in range(len(header))]
    for row in [header, *rows]:
        cells = [c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True)]
        print("  ".join(cells).rstrip())


def _numeric(rows: Sequence[Sequence[str]], column: int) -> bool:
    cells = [r[column] for r in rows if r[column]]
    return bool(cells) and all(c.rstrip("x%").replace(",", "").replace(".", "", 1).lstrip("-").isdigit() for c in cells)


class Progress:
    """Calling it counts one; a line on the terminal is kept up to date when the work takes longer than a second."""

    def __init__(self, what: str, *, quiet: bool = False) -> None:
        self.what, self.quiet = what, quiet or not sys.stderr.isatty()
        self.count = 0
        self.began = self.shown = time.monotonic()

    def __enter__(self) -> Progress:
        return self

    def __call__(self) -> None:
        self.count += 1
        now = time.monotonic()
        if not self.quiet and now - self.shown > 0.3 and now - self.began > 1:
            print(f"\r{self.count} {self.what}, {now - self.began:.0f} s", end="", file=sys.stderr, flush=True)
            self.shown = now

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not self.quiet and self.shown > self.began:
            print("\r" + " " * 40 + "\r", end="", file=sys.stderr, flush=True)
