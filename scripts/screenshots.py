"""Make docs/images: the dashboard (light, dark, phone) and the command line, of a small run made on the spot.

Usage: make screenshots, or python scripts/screenshots.py [--out FOLDER] with the extra `browser` and a Chromium.
"""

from __future__ import annotations

import argparse
import io
import os
import pty
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from PIL import Image
from rich.console import Console
from rich.text import Text
from screenshot_run import Replica, Trainer

from delta_sync.cli.dashboard.live import LiveRun
from delta_sync.cli.dashboard.server import DashboardServer
from delta_sync.cli.run import open_ledger
from delta_sync.cli.view import RunView

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "cli"))
from browser import chromium  # noqa: E402

VERSIONS, RESTART, BEHIND = 72, 40, 60  # where a trainer takes over, and where a replica dies
DASHBOARDS = {"dashboard-light": ("light", 1180), "dashboard-dark": ("dark", 1180), "dashboard-phone": ("light", 390)}
COMMANDS = {
    "cli-ledger": (["ledger", "{uri}", "--last", "8"], 150),
    "cli-inspect": (["inspect", "{uri}", "--top", "4"], 118),
    "cli-doctor": (["doctor", "{uri}"], 110),
}
# A line is as high as the font says, so that the lines of tables meet.
TERMINAL = """<meta charset="utf-8"><body style="margin: 0"><pre style="margin: 0; display: inline-block;
padding: 14px 18px; background: #14181f; color: #dfe4ea; font: 14px 'DejaVu Sans Mono', Menlo, Consolas, monospace;
line-height: normal">{code}</pre>"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        uri = f"{folder}/run"
        trainer = Trainer(uri)
        live = LiveRun(RunView(open_ledger(uri)), 0.1)
        with live, DashboardServer(live) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            train(trainer, uri, live)
            for name, (scheme, width) in DASHBOARDS.items():
                save(out / f"{name}.png", dashboard(browser, server.url, scheme, width))
            server.shutdown()
        for name, (words, width) in COMMANDS.items():
            save(out / f"{name}.png", terminal(browser, [word.format(uri=uri) for word in words], width, uri))


def train(trainer: Trainer, uri: str, live: LiveRun) -> None:
    """All that the pictures are to show: anchors, a fold, two trainers, a replica that died and one that refuses."""
    fleet = [Replica(name, uri) for name in ("frankfurt-0", "frankfurt-1", "oregon-0", "oregon-1")]
    for replica in fleet:
        replica.start()
    for version in range(2, VERSIONS - 1):
        manifest = trainer.restart() if version == RESTART else trainer.step()
        if version % 24 == 0:
            trainer.anchor(manifest)
        if version == 56:
            command(["compact", uri, "--from", "48"])
        if version == BEHIND:
            fleet.pop().stop()
        served_by(fleet, version)
        live.sections("all")  # as an open page asks
        time.sleep(0.3)
    kept = fleet[:2]
    for replica in kept:
        replica.stop()
    manifest = trainer.step(corrupt="object")
    if not fleet[2].refused.wait(60):
        raise TimeoutError("the damaged object was not refused within 60 s")
    trainer.heal(manifest)
    again = [Replica(replica.name, uri) for replica in kept]
    for replica in again:
        replica.start()
    trainer.step()
    served_by(again, VERSIONS)
    time.sleep(1)
    for replica in [*again, fleet[2]]:
        replica.stop()


def served_by(fleet: list[Replica], version: int) -> None:
    end = time.monotonic() + 60
    while any((replica.version or 0) < version for replica in fleet):
        if time.monotonic() > end:
            raise TimeoutError(f"version {version} was not served within 60 s")
        time.sleep(0.01)


def dashboard(browser, url: str, scheme: str, width: int) -> bytes:
    scale = 2 if width < 500 else 1
    context = browser.new_context(
        viewport={"width": width, "height": 844}, color_scheme=scheme, device_scale_factor=scale
    )
    page = context.new_page()
    page.goto(url)
    page.wait_for_selector("html[data-ready]")
    page.locator("#timeline svg text").filter(has_text="Reward").wait_for()
    page.locator("#heat .readout").filter(has_text="most changed").wait_for()
    page.locator("#uri").evaluate("(node) => (node.textContent = 'file:///mnt/run')")  # as in the other pictures
    top = {"x": 0, "y": 0, "width": width, "height": 1900}
    picture = page.screenshot(full_page=True, **({"clip": top} if width < 500 else {}))
    context.close()
    return picture


def command(words: list[str], columns: int = 120) -> str:
    """What ``delta-sync`` draws in a terminal."""
    parent, child = pty.openpty()
    environment = os.environ | {"COLUMNS": str(columns), "LINES": "60", "TERM": "xterm-256color"}
    process = subprocess.Popen(
        [sys.executable, "-m", "delta_sync.cli", *words], stdout=child, stderr=child, stdin=child, env=environment
    )
    os.close(child)
    deadline = threading.Timer(60, process.kill)  # which ends the read below too
    deadline.start()
    shown = b""
    try:
        while data := os.read(parent, 65536):
            shown += data
    except OSError:
        pass  # how a terminal whose last program ended is read
    os.close(parent)
    deadline.cancel()
    if process.wait(60) not in (0, 1):
        raise RuntimeError(f"delta-sync {' '.join(words)} failed: {shown.decode(errors='replace')}")
    return shown.decode(errors="replace")


def terminal(browser, words: list[str], columns: int, uri: str) -> bytes:
    """A picture of a command and what it draws; the run's folder is shown under a shorter name."""
    shown = re.sub(re.escape(f"file://{uri}"), "file:///mnt/run", command(words, columns))
    prompt = f"$ delta-sync {' '.join(words)}".replace(uri, "/mnt/run")
    console = Console(record=True, width=columns, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text(prompt, style="bold"))
    console.print(Text.from_ansi(shown.replace("\r\n", "\n").rstrip()))
    drawn = console.export_html(inline_styles=True, code_format=TERMINAL)
    context = browser.new_context(viewport={"width": 1400, "height": 600}, device_scale_factor=1)
    page = context.new_page()
    page.set_content(drawn)
    picture = page.locator("pre").screenshot()
    context.close()
    return picture


def save(path: Path, png: bytes) -> None:
    """With 200 colours: a page and a terminal have few, and a repository keeps every picture for ever."""
    image = Image.open(io.BytesIO(png)).convert("RGB")
    image.quantize(200, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path.name}: {image.width} x {image.height}, {path.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    main()
