"""The two-Space run on one machine: what the Hub does is played here, what is ours runs as it would there.

    python -m examples.wordle.rehearsal                 # 8 steps
    python -m examples.wordle.rehearsal --kill-server   # the rollouts' entrypoint killed -9 half way, and restarted

The tests' Hub holds bucket and Spaces. `examples.wordle.spaces` creates them there; each Space is then built from
what it uploaded, by its Dockerfile's steps, in a root and a network namespace of its own, and its entrypoint runs there
as a user of its own. The trainer is started with the command that `spaces` prints: it knows both by URL and key alone.
Needs Linux and root; no Docker engine. The report and the last line are the demo's.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from examples.wordle import commands, demo, spaces
from examples.wordle.display import Display
from examples.wordle.processes import Child, Processes, ProcessFailed
from examples.wordle.stream import StreamRecorder
from examples.wordle.watch import StatusWatcher

sys.path.insert(0, str(demo.ROOT / "tests"))  # the Hub that stands in, and the containers, are the tests'
from helpers.container import Container, ContainerFailed, why_not
from helpers.hub import TestHub
from helpers.hub.server import WRITE_TOKEN
from helpers.hub.spaces_stand_in import SpaceStandIn

NETWORK = "10.77.0"
BRIDGE = "spaces0"
PORT = 8900
HUB = f"http://{NETWORK}.1:{PORT}"
HOSTS = {"wordle-env": (f"{NETWORK}.2", "1001"), "wordle-rollouts": (f"{NETWORK}.3", "1000")}  # address, user
URI = "hf://buckets/tester/wordle/run-1"
INSIDE = "DELTA_SYNC_REHEARSAL"


class Rehearsal(demo.Demo):
    """The demo, with Spaces in the place of its two servers."""

    def __init__(self, args: argparse.Namespace, folder: Path, processes: Processes, display: Display) -> None:
        super().__init__(args, folder, processes, display)
        self.env_url, self.server_url = (f"http://{address}:7860" for address, _ in HOSTS.values())
        self.hub = TestHub(PORT, host=f"{NETWORK}.1")
        self.hub.api.spaces.build = self._build
        self.open = ExitStack()  # the hub and the containers
        self.containers: dict[str, Container] = {}
        self.environments: dict[str, dict[str, str]] = {}
        self.kills = 0

    def _start_servers(self, model: str) -> None:
        self.open.enter_context(self.hub)
        self.model = model
        plan = spaces.Plan(spaces.parse_args(self._words(model)), "tester")
        self.command = spaces.create(spaces.HfApi(endpoint=HUB, token=WRITE_TOKEN), plan, self.display.say)
        self.api_key = plan.keys()[0]["VLLM_API_KEY"]

    def _words(self, model: str) -> list[str]:
        read_back = json.dumps({"read_back": True})  # to compare the served bits in the end
        serve = f"--enforce-eager --max-model-len {self.args.context} --max-num-seqs {self.args.generations + 1} "
        serve += f"--max-num-batched-tokens 64 --delta-sync-config {shlex.quote(read_back)}"
        words = ["--flavor", "cpu", "--model", model, "--keys", str(self.folder / "keys.env")]
        return [*words, f"--vllm-args={serve}", f"--timeout={self.args.server_timeout}"]

    def _build(self, space: SpaceStandIn) -> str:
        """What the Hub does after a commit: build the image from the repository, start it, wait for its port."""
        name = space.id.split("/")[1]
        address, user = HOSTS[name]
        context = self.folder / "spaces" / name
        for path, data in space.files.items():
            (context / path).parent.mkdir(parents=True, exist_ok=True)
            (context / path).write_bytes(data)
        binds = {self.model: Path(self.model)}  # the one thing that a Space would download
        container = Container(self.folder / "roots" / name, context, binds=binds, user=user)
        self.containers[name] = self.open.enter_context(container)
        container.join(BRIDGE, f"{address}/24")
        # HF_ENDPOINT stands for huggingface.co; the threads are this machine's, which three processes share.
        threads = {"OMP_NUM_THREADS": commands.variables(self.model)["OMP_NUM_THREADS"]}
        self.environments[name] = {**space.variables, **space.secrets, "HF_ENDPOINT": HUB, **threads}
        child = self._start(name)
        space.host = f"http://{address}:7860"
        self.processes.wait(lambda: demo.healthy(space.host), child, self.args.server_timeout)
        return "RUNNING"

    def _start(self, name: str) -> Child:
        command = self.containers[name].command(self.environments[name])
        child = self.processes.start(f"{name}-{self.kills}" if self.kills else name, command)
        if name == "wordle-rollouts":
            self.server = child
        return child

    def _start_trainer(self, model: str) -> Child:
        more = {"steps": self.args.steps, "generations": self.args.generations, "turns": self.args.turns}
        more |= {"learning-rate": self.args.learning_rate, "output": self.training, "codec": self.args.codec}
        words = [f"--{name}={value}" for name, value in more.items()]
        return self.processes.start(
            "trainer", ["sh", "-ec", f"{self.command} {shlex.join(words)}"], commands.variables(model)
        )

    def _show(self, watcher: StatusWatcher, stream: StreamRecorder) -> None:
        super()._show(watcher, stream)
        if self.args.kill_server and not self.kills and (watcher.version or 0) > self.args.steps // 2:
            self.display.say(f"killing the rollouts at version {watcher.version}, and starting their entrypoint again")
            self.kills += 1
            self.processes.kill(self.server)
            self._start("wordle-rollouts")

    def summary(self) -> dict[str, Any]:
        """Run, and say what came of it."""
        with self.open:
            found = self.run()
        found["server_kills"] = self.kills
        if self.args.kill_server:  # an open stream ends with the server that it comes from
            streams = ("streams_interrupted", "most_commits_in_one_stream")
            found["failed"] = [name for name in found["failed"] if not name.startswith(streams)]
            found["failed"] += [] if self.kills == 1 else ["the server was killed"]
        return found


def enter_network() -> None:
    """Start over in a network namespace with a bridge and nothing else, gone with this process."""
    if trouble := why_not():
        sys.exit(f"the rehearsal {trouble}")
    clean = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    env = {**clean, INSIDE: "1", "HF_ENDPOINT": HUB, "HF_TOKEN": WRITE_TOKEN, "DELTA_SYNC_URI": URI}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env.get('PATH', '')}"  # the command says `python`
    command = [sys.executable, "-m", "examples.wordle.rehearsal", *sys.argv[1:]]
    os.execvpe("unshare", ["unshare", "--net", *command], env)


def make_network() -> None:
    """A bridge with this side's address, which containers plug into."""
    for words in ("link set lo up", f"link add {BRIDGE} type bridge", f"addr add {NETWORK}.1/24 dev {BRIDGE}",
                  f"link set {BRIDGE} up"):  # fmt: skip
        subprocess.run(["ip", *words.split()], check=True)


def main() -> int:
    """Exit code 0: every criterion holds; 1: one does not, or it failed; 130: interrupted."""
    parser = demo.parser(__doc__)
    parser.set_defaults(steps=8)
    parser.add_argument("--kill-server", action="store_true", help="kill -9 the rollouts half way, and restart them")
    args = demo.parse(parser)
    if INSIDE not in os.environ:
        enter_network()
    make_network()
    folder = args.output.resolve() / f"rehearsal-{time.strftime('%Y%m%d-%H%M%S')}"
    return demo.conduct(
        "rehearsal",
        folder,
        lambda display, processes: Rehearsal(args, folder, processes, display).summary(),
        (ProcessFailed, ContainerFailed, spaces.SpacesFailed, *demo.FAILURES),
    )


if __name__ == "__main__":
    sys.exit(main())
