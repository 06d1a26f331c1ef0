"""Every Python block of README.md and docs/ runs, page by page in one namespace; ```python no-run marks what cannot here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```python[ \t]*\n(.*?)^```", re.M | re.S)
PAGES = sorted(p.relative_to(ROOT).as_posix() for p in [ROOT / "README.md", *ROOT.glob("docs/*.md")] if p.exists())


@pytest.mark.parametrize("page", PAGES)
def test_code_on_the_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / page).read_text()
    blocks = BLOCK.findall(text)
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__docs__"}
    for i, block in enumerate(blocks):
        exec(compile(block, f"{page} block {i + 1}", "exec"), namespace)


@pytest.mark.parametrize("page", PAGES)
def test_links_on_the_page_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", (ROOT / page).read_text()):
        if not target.startswith(("http://", "https://", "mailto:")):
            assert (ROOT / page).parent.joinpath(target).exists(), f"{page} links to {target}, which does not exist"
