"""MkDocs hooks: pages from outside docs/, generated ones, links as the repository means them, pictures in the page.

The Markdown files stay where they are and keep links that work in a checkout; nothing is copied into docs/.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import messages  # noqa: E402
import server_reference  # noqa: E402

OUTSIDE = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "project/ARCHITECTURE.md",
    "CHANGELOG.md": "project/CHANGELOG.md",
    "CONTRIBUTING.md": "project/CONTRIBUTING.md",
    "benchmarks/README.md": "project/benchmarks.md",
    "benchmarks/scaling.svg": "project/scaling.svg",
    "benchmarks/gpu/README.md": "project/gpu.md",
    "examples/wordle/README.md": "project/wordle.md",
}
GENERATED = {"MESSAGES.md": messages.page, "api/server.md": server_reference.page}
_BACK = {page: source for source, page in OUTSIDE.items()}
_FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
_PICTURE = re.compile(r"!\[([^\]]*)\]\((?:[^)\s]*/)?(img/[\w-]+\.svg)\)")


def on_config(config: Any) -> Any:
    """Put pages that have no line in mkdocs.yml at the end, so that none is lost."""
    docs = Path(config.docs_dir)
    pages = [path.relative_to(docs).as_posix() for path in sorted(docs.rglob("*.md"))]
    if more := [page for page in pages if repr(page) not in repr(config.nav)]:
        config.nav.append({"More": more})
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are no files of docs/."""
    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    for page, make in GENERATED.items():
        files.append(File.generated(config, page, content=make()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Lead links to the site's pages, and draw pictures into the page."""
    parts = _FENCED.split(markdown)
    for k in range(0, len(parts), 2):
        parts[k] = _PICTURE.sub(_drawn, _LINK.sub(lambda m: _led(m, page.file.src_uri, files), parts[k]))
    return "".join(parts)


def _led(match: re.Match[str], page: str, files: Files) -> str:
    text, target, anchor = match[1], match[2], match[3] or ""
    if ":" in target:
        return match[0]
    here = _BACK.get(page, f"docs/{page}")
    there = posixpath.normpath(posixpath.join(posixpath.dirname(here), target))
    for found in (there, f"{there}/README.md"):
        uri = OUTSIDE.get(found, found.removeprefix("docs/"))
        if files.get_file_from_path(uri) is not None:
            return f"[{text}]({posixpath.relpath(uri, posixpath.dirname(page) or '.')}{anchor})"
    # a file of the repository that is no page keeps its name; what is not there at all fails the build
    return text if (ROOT / there).exists() else match[0]


def _drawn(match: re.Match[str]) -> str:
    """The SVG itself: as part of the page it takes the page's colours, which an <img> cannot."""
    drawing = re.sub(r"<\?xml.*?\?>|<!--.*?-->|\n\s*", " ", (ROOT / "docs" / match[2]).read_text())
    return f'<figure class="drawing" role="img" aria-label="{match[1]}">{drawing}</figure>'
