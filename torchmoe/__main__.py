"""The command line: ``python -m torchmoe plan | capacity | roofline | simulate | profile``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from torchmoe.alloc.cli import main as _main

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0, 2 where an input was refused, or 130 where the user stopped it."""
    try:
        return _main(sys.argv[1:] if argv is None else list(argv))
    except KeyboardInterrupt:
        print("torchmoe: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of the output has enough of it, e.g. head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
