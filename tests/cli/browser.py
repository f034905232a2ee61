"""A headless Chromium for tests and screenshots, where the machine has one."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def why_not() -> str | None:
    """What is missing, or None."""
    try:
        import playwright.sync_api  # noqa: F401
    except ModuleNotFoundError:
        return "playwright is not installed: make test-ui installs it"
    return None if path() else f"none of {', '.join(NAMES)} is installed: make test-ui installs it, as root"


def path() -> str | None:
    """Where the machine's own Chromium is: playwright's would have to be downloaded."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """A playwright Browser."""
    from playwright.sync_api import sync_playwright

    # Chromium's own sandbox needs a user who is not root.
    words = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path(), args=words)
        try:
            yield browser
        finally:
            browser.close()
