"""One line of the comparison: published, computed, deviation, verdict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Check", "Paper", "Verdict"]

Verdict = Literal["equal", "close", "differs", "not computable"]
EQUAL, CLOSE = 0.01, 0.15


@dataclass(frozen=True, kw_only=True)
class Check:
    """A published figure beside ours.

    Args:
        paper, item: where the figure is from and what it is.
        published: a number, a range, or text where the paper states none.
        computed: ours; None: it cannot be computed, ``note`` says why.
        expected: the verdict recorded with this program: a change is an error, a difference is not.
        note: what explains a difference, and what was assumed.
    """

    paper: str
    item: str
    published: float | tuple[float, float] | str
    computed: float | str | None
    expected: Verdict
    unit: str = ""
    note: str = ""

    @property
    def deviation(self) -> float | None:
        """Relative; from the nearer end of a range."""
        if isinstance(self.computed, str) or self.computed is None or isinstance(self.published, str):
            return None
        low, high = self.published if isinstance(self.published, tuple) else (self.published, self.published)
        near = min(max(self.computed, low), high)
        return (self.computed - near) / near

    @property
    def verdict(self) -> Verdict:
        """equal within 1 % (text: the same), close within 15 %, else differs."""
        if self.computed is None:
            return "not computable"
        d = self.deviation
        if d is None:
            return "equal" if self.computed == self.published else "differs"
        return "equal" if abs(d) <= EQUAL else "close" if abs(d) <= CLOSE else "differs"

    def row(self) -> list[str]:
        def text(x: float | tuple[float, float] | str | None) -> str:
            if x is None:
                return "-"
            if isinstance(x, tuple):
                return f"{x[0]:g}-{x[1]:g}"
            return x if isinstance(x, str) else f"{x:.4g}"

        d = "" if self.deviation is None else f"{self.deviation:+.1%}"
        changed = "" if self.verdict == self.expected else f"  CHANGED (was {self.expected})"
        return [self.paper, self.item, text(self.published), text(self.computed), self.unit, d, self.verdict + changed, self.note]


@dataclass(frozen=True)
class Paper:
    """Makes the checks of one paper."""

    name: str

    def __call__(
        self,
        item: str,
        published: float | tuple[float, float] | str,
        computed: float | str | None,
        *,
        expected: Verdict = "equal",
        unit: str = "",
        note: str = "",
    ) -> Check:
        return Check(paper=self.name, item=item, published=published, computed=computed, expected=expected, unit=unit, note=note)

    def unknown(self, item: str, published: float | tuple[float, float] | str, note: str) -> Check:
        """A figure that cannot be computed here, and why."""
        return self(item, published, None, expected="not computable", note=note)
