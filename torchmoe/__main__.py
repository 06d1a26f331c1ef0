"""The command line: ``python -m torchmoe plan | capacity | roofline | simulate | profile``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torchmoe.alloc.cli import main as _main

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0, or 2 where an input was refused."""
    return _main(sys.argv[1:] if argv is None else list(argv))


if __name__ == "__main__":
    sys.exit(main())
