"""Every code block of the documentation, with what its text says about running it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("docs/**/*.md"), *(ROOT / n for n in ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md"))])
PAGES += sorted(ROOT.glob("examples/**/README.md"))
RUN = ("bash", "console", "python")
TRAINS = re.compile(r"\.train\(\)")
ASKS = re.compile(r"^(\$ )?curl ", re.MULTILINE)
SHOWN = ("text", "json", "yaml")  # figures, formulas, what a program prints
_MARK = re.compile(r"<!-- (not run|run with): ([^>]+?) -->\s*$")


@dataclass(frozen=True)
class Block:
    """One fenced or indented block; ``line`` is where its fence is. ``world``: what it asks to run with."""

    page: str
    line: int
    language: str
    code: str
    not_run: str | None
    world: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks() -> list[Block]:
    """Those of all pages, in order."""
    return [block for page in PAGES for block in blocks_of(page)]


def blocks_of(page: Path) -> list[Block]:
    """Those of one page; a mark is an HTML comment on the line before its block."""
    text = page.read_text()
    lines, found = text.splitlines(), []
    for token in MarkdownIt().parse(text):
        if token.type in ("fence", "code_block"):
            assert token.map is not None
            start = token.map[0]
            mark = _MARK.search(lines[start - 1]) if start else None
            said = {mark[1]: mark[2]} if mark else {}
            name = page.relative_to(ROOT).as_posix()
            language = token.info.strip() if token.type == "fence" else "text"
            found.append(Block(name, start + 1, language, token.content, said.get("not run"), said.get("run with")))
    return found


def of(*languages: str, where: Callable[[Block], object] = lambda block: True) -> pytest.MarkDecorator:
    """Parametrised by the blocks of these languages that are to be run."""
    chosen = [b for b in blocks() if b.language in languages and b.not_run is None and where(b)]
    return pytest.mark.parametrize("block", chosen, ids=str)
