"""Writes docs/TRANSCRIPT.md: a session from the README to a trained run, and to why a replica lags, by the CLI alone.

Usage: python scripts/transcript.py [PAGE]

Everything is run: README's script by TRL against a real `vllm serve` of a tiny model, then a second server that is to
follow the same run after one bit of one object was flipped. Commands and what they printed go to the page; only names
of temporary folders and ports are replaced by the README's. Ends with 1 if the commands do not lead to the cause.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from helpers.server import QUIET_CPU, VllmServer  # noqa: E402
from helpers.tiny_models import build  # noqa: E402

PATIENCE = 1500.0  # seconds for each thing that is waited for: it may run beside other work
MARK = "<!-- not run: this page is written by scripts/transcript.py, which runs it -->\n"
SERVER, MODEL, RUN = "http://rollouts:8000", "Qwen/Qwen3-0.6B", "/mnt/run"
TRAIN = "python train.py > train.log 2>&1; grep train_runtime train.log || tail -30 train.log"


class Page:
    """The page so far, and the names to show instead of the real ones."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.text = folder, ""
        self.names: dict[str, str] = {}

    def say(self, text: str) -> None:
        """A paragraph."""
        self.text += f"{text.strip()}\n\n"

    def show(self, language: str, content: str) -> None:
        """A block, marked as run here and not by the tests."""
        for real, shown in self.names.items():
            content = content.replace(real, shown)
        self.text += f"{MARK}```{language}\n{content.rstrip()}\n```\n\n"

    def run(self, *lines: str, code: int = 0) -> str:
        """Run commands in a shell, show them with what they print; the last one must end with ``code``."""
        content, printed = "", ""
        for line in lines:
            done = subprocess.run(
                ["bash", "-c", self.real(line)], cwd=self.folder, env=environment(self.folder), text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=PATIENCE, check=False,
            )  # fmt: skip
            content += f"$ {line}\n{done.stdout.rstrip()}\n"
            printed += done.stdout
        if code:
            content += f"$ echo $?\n{code}\n"
        self.show("console", content)
        fine = done.returncode == code and "Traceback" not in printed
        expect(fine, f"exit code {done.returncode} of {lines[-1]}: {printed}")
        return printed

    def real(self, line: str) -> str:
        """A shown command as it is run."""
        for real, shown in self.names.items():
            line = line.replace(shown, real)
        return line


def expect(holds: object, what: str) -> None:
    """End the session if what it is to show did not happen."""
    if not holds:
        sys.exit(f"transcript: {what}")


def environment(folder: Path) -> dict[str, str]:
    """Quiet and offline, with ``delta-sync`` and ``python`` on the path."""
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, **QUIET_CPU, "PATH": path, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}


def programs(folder: Path) -> None:
    """``delta-sync`` and ``python`` of this environment, installed or not."""
    (folder / "bin").mkdir()
    for name, arguments in (("delta-sync", "-m delta_sync.cli"), ("python", "")):
        script = folder / "bin" / name
        script.write_text(f'#!/bin/sh\nexec {sys.executable} {arguments} "$@"\n')
        script.chmod(0o755)


def readme_script() -> str:
    """The first Python block of the README."""
    found = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert found is not None
    return found[1]


def script_of(page: Page, model: str, steps: int, url: str) -> str:
    """README's script for this model and so many steps, with anchors often enough for a short run."""
    text = readme_script().replace(MODEL, model).replace("max_steps=100", f"max_steps={steps}")
    text = text.replace("bf16=True", "bf16=True, use_cpu=True, max_completion_length=16")
    text = text.replace(f'DeltaSyncCallback("{RUN}")', f'DeltaSyncCallback("{RUN}", anchor_every=3)')
    return page.real(text.replace(SERVER, url))


def main() -> None:
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "TRANSCRIPT.md"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        page = Page(folder)
        programs(folder)
        checkpoint = build(folder / "tiny")
        page.names = {str(checkpoint): MODEL, str(folder / "run"): RUN}
        try:
            train(page, folder, checkpoint)
            flip_one_bit(folder / "run")
            find(page, folder, checkpoint)
        finally:
            target.write_text(page.text)  # of a session that failed too: what was said shows where
    print(f"{target}: {len(page.text.splitlines())} lines")


def serve_line(replica: str) -> str:
    """The line that starts a replica, as a user types it."""
    return f'vllm serve {MODEL} --delta-sync {RUN} --delta-sync-config \'{{"replica": "{replica}"}}\''


@contextmanager
def server(page: Page, folder: Path, checkpoint: Path, replica: str) -> Iterator[VllmServer]:
    """A replica of this name while the block runs; its address is shown as the README's."""
    arguments = ["--delta-sync", str(folder / "run"), "--delta-sync-config", f'{{"replica": "{replica}"}}']
    found = VllmServer(checkpoint, folder / f"{replica}.log", arguments)
    page.names[found.url] = SERVER
    try:
        found.start()
        found.wait_healthy(PATIENCE)
        yield found
    finally:
        found.stop()


def train(page: Page, folder: Path, checkpoint: Path) -> None:
    """From the README to a trained run."""
    page.say(
        "# A lagging replica: transcript\n\n"
        "A session as a newcomer has it: the README's two lines, a trained run, then a replica that does not keep up. "
        "What is wrong is found with the command line alone. `python scripts/transcript.py` ran all of this and wrote "
        "the page; the model is a tiny one with random weights, and names of temporary folders are replaced."
    )
    page.say("## Training\n\nOn the rollout machine:")
    page.show("console", f"$ {serve_line('rollouts-0')} &")
    page.say(
        "On the trainer's, README's script with 5 short steps on the CPU, and an anchor every third version "
        "as the run is so short:"
    )
    with server(page, folder, checkpoint, "rollouts-0") as first:
        script = script_of(page, str(checkpoint), 5, first.url)
        (folder / "train.py").write_text(script)
        page.show("python", script)
        page.run(TRAIN)
        first.wait_version(6, timeout=PATIENCE)
        page.run(f"delta-sync ledger {RUN}")


def flip_one_bit(run: Path) -> None:
    """The planted fault: one bit of the newest version's object, as a bad disk or a careless copy does it."""
    path = sorted(run.glob("deltas/*"))[-1]
    data = bytearray(path.read_bytes())
    data[len(data) * 3 // 4] ^= 1
    path.write_bytes(data)


def wait_acknowledged(path: Path, version: int) -> None:
    """Until the replica's word in the bucket says this version: it comes a moment after its status."""
    deadline = time.monotonic() + PATIENCE
    while not path.exists() or json.loads(path.read_text()).get("version") != version:
        expect(time.monotonic() < deadline, f"{path.name} does not say version {version}")
        time.sleep(0.1)


def find(page: Page, folder: Path, checkpoint: Path) -> None:
    """A second replica lags; ledger, verify, inspect and doctor say why, and a way out is taken."""
    page.say(
        "## The next day\n\nTraining is over and the trainer gone. The rollout machine is replaced by another, which "
        "is started with the same line. (What nobody knows: overnight one bit of one file in the bucket flipped.)"
    )
    page.show("console", f"$ {serve_line('rollouts-1')} &")
    with server(page, folder, checkpoint, "rollouts-1") as second:
        second.wait_status("a refusal", lambda s: (s["state"], s["version"]) == ("refused", 5), PATIENCE)
        wait_acknowledged(folder / "run" / "replicas" / "rollouts-1.json", 5)
        page.say("It is a version behind, and does not catch up. Who serves what?")
        said = page.run(f"delta-sync ledger {RUN} --last 4", code=1)
        expect(
            "refused 6" in said and "sha256 of object" in said, "the ledger does not name the refused version and why"
        )
        page.say(
            "`rollouts-1` lags: it would not take version 6, because an object of that is not what the manifest "
            "promises. It serves version 5, the newest that it can prove. Is it the bucket, or that machine?"
        )
        said = page.run(f"delta-sync verify {RUN}", code=1)
        expect("deltas/000000000006" in said, "verify does not name the object")
        page.say(
            "It is the bucket: whoever reads version 6 meets the same, and all else is whole and proven. Looking "
            "into that version says so too, the one before is fine:"
        )
        page.run(f"delta-sync inspect {RUN}@6 --top 1", code=1)
        page.run(f"delta-sync inspect {RUN}@5 --top 3 | head -3")
        page.say("And is it the store as such, or was it this one file?")
        page.run(f"delta-sync doctor {RUN}")
        page.say(
            "The store is well. So: one damaged object, with no trainer there to put it again.\n\n"
            "## The way out\n\nVersion 5 is whole. It becomes a checkpoint, and training goes on from it on that URI:"
        )
        page.run(f"delta-sync materialize {RUN}@5 ckpt-5")
        script = script_of(page, "ckpt-5", 2, second.url)
        (folder / "train.py").write_text(script)
        page.run("sed -n '/model=/p;/max_steps/p' train.py", TRAIN)
        second.wait_status("a live state", lambda status: status["state"] == "live" and status["lag"] == 0, PATIENCE)
        said = page.run(f"delta-sync ledger {RUN} --last 3")
        expect("refused" not in said, "the replica still refuses")
        page.say(
            "The new trainer took epoch 2. Its first version has the bits of version 5, which `rollouts-1` serves, so "
            "that follows again at once. `rollouts-0`, which is no more, is what it was heard of last."
        )


if __name__ == "__main__":
    main()
