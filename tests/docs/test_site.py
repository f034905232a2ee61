"""The site builds without a warning, leads nowhere wrong, and asks no other host for anything."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from blocks import ROOT

pytest.importorskip("mkdocs", reason="the site is built where the extra dev is installed")


class Fetched(HTMLParser):
    """What a browser fetches by itself when it shows a page."""

    def __init__(self):
        super().__init__()
        self.urls, self.drawings, self.ids = [], 0, set()

    def handle_starttag(self, tag, attributes):
        said = dict(attributes)
        if tag in ("script", "img", "iframe", "source"):
            self.urls.append(said.get("src"))
        if tag == "link" and said.get("rel") in ("stylesheet", "preconnect", "icon", "preload"):
            self.urls.append(said.get("href"))
        self.drawings += tag == "figure"
        self.ids.add(said.get("id"))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def read(path):
    page = Fetched()
    page.feed(path.read_text())
    return page


def test_no_page_fetches_from_another_host(site):
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 20
    for path in pages:
        away = [url for url in read(path).urls if url and re.match(r"(https?:)?//", url)]
        assert not away, f"{path.relative_to(site)}: {away}"
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//|@import", style.read_text()), style


def test_pictures_are_in_their_pages(site):
    concepts = read(site / "CONCEPTS" / "index.html")
    assert concepts.drawings == 4
    assert read(site / "index.html").drawings == 1


def test_the_api_is_there(site):
    core = read(site / "api" / "core" / "index.html").ids
    assert {"delta_sync.diff", "delta_sync.ledger.Ledger.plan", "delta_sync.store.Store.put"} <= core, sorted(
        filter(None, core)
    )
    trainer = read(site / "api" / "trainer" / "index.html").ids
    assert "trl_callback.attaching.attach" in trainer
    server = (site / "api" / "server" / "index.html").read_text()
    assert "--delta-sync-max-lag" in server and "/delta_sync/rollback" in server
