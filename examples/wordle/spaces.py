"""Rollouts and environment as two Hugging Face Spaces, and the bucket between them and your trainer.

    python -m examples.wordle.spaces                       # create or update, wait until healthy, say how to train
    python -m examples.wordle.spaces --flavor cpu          # the smallest: a 135M model, no GPU
    python -m examples.wordle.spaces --dry-run             # say what would be done
    python -m examples.wordle.spaces --teardown            # delete both Spaces and the bucket

You must be logged in (`hf auth login`, or HF_TOKEN). Hardware other than cpu-basic costs money while a Space runs.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx2
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

from examples.wordle.patience import Patience
from examples.wordle.space_files import ROOT, stage_environment, stage_rollouts
from examples.wordle.wake import NotAwake, wait_until_awake

POLL = 2.0  # seconds
LOG_LINES = 15
FREE = "cpu-basic"
SLEEP = 3600  # seconds without a request after which paid hardware is let go; a rollout is a request
FAILED = ("BUILD_ERROR", "CONFIG_ERROR", "RUNTIME_ERROR", "NO_APP_FILE", "DELETING")
ASLEEP = ("PAUSED", "STOPPED", "SLEEPING")
SPACE_TOKEN = "SPACE_HF_TOKEN"
SMALL = "--enforce-eager --max-model-len 1024 --max-num-seqs 9"


class SpacesFailed(RuntimeError):
    """A Space could not be made or did not get up; the message says which, and what to do."""


@dataclass(frozen=True)
class Flavor:
    """What to serve, on what, and how the trainer suits it."""

    model: str
    hardware: str
    variables: dict[str, str]
    train: str


FLAVORS = {
    "gpu": Flavor(
        "Qwen/Qwen3-1.7B", "l4x1", {"SERVE_ARGS": "--max-model-len 4096"}, "--generations 4 --learning-rate 1e-6"
    ),
    "cpu": Flavor(
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        FREE,
        {"SERVE_ARGS": SMALL, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
        "--turns 2",
    ),
}


@dataclass(frozen=True)
class Space:
    """One Space as it should be."""

    repo: str
    hardware: str
    variables: dict[str, str]
    secrets: dict[str, str]
    stage: Callable[[Path], Path]
    probe: str  # a route that asks for the key
    key: str


class Plan:
    """Names and settings of everything, from the command line; the keys come from, and stay in, one private file."""

    def __init__(self, args: argparse.Namespace, owner: str) -> None:
        self.args, self.flavor = args, FLAVORS[args.flavor]
        self.model = args.model or self.flavor.model
        self.hardware = args.hardware or self.flavor.hardware
        self.bucket = f"{owner}/{args.name}"
        self.uri = f"hf://buckets/{self.bucket}/{args.run}"
        self.rollouts, self.environment = f"{self.bucket}-rollouts", f"{self.bucket}-env"
        self.keys_file = Path(args.keys or ROOT / "runs" / f"{args.name}.env").resolve()

    def spaces(self, keys: dict[str, str], token: str) -> tuple[Space, Space]:
        """The two Spaces, environment first: it is up long before the other."""
        model = {"MODEL": self.model, "DELTA_SYNC_URI": self.uri, **self.flavor.variables}
        if self.args.vllm_args is not None:
            model["SERVE_ARGS"] = self.args.vllm_args
        vllm, env = keys["VLLM_API_KEY"], keys["WORDLE_ENV_TOKEN"]
        cpu = self.args.flavor == "cpu"
        return (
            Space(self.environment, FREE, {}, {"WORDLE_ENV_TOKEN": env}, stage_environment, "/metadata", env),
            Space(self.rollouts, self.hardware, model, {"VLLM_API_KEY": vllm, "HF_TOKEN": token},
                  lambda folder: stage_rollouts(folder, cpu=cpu), "/v1/models", vllm),
        )  # fmt: skip

    def keys(self) -> tuple[dict[str, str], bool]:
        """The Spaces' keys, and whether they are new: not kept yet."""
        names = ("VLLM_API_KEY", "WORDLE_ENV_TOKEN")
        if self.keys_file.exists() and not self.args.new_keys:
            found = dict(re.findall(r"^export (\w+)=(\S+)$", self.keys_file.read_text(), re.MULTILINE))
            if set(names) <= set(found):
                return found, False
        return {name: secrets.token_urlsafe(32) for name in names}, True

    def keep(self, keys: dict[str, str]) -> None:
        """Write the file that the next run and the trainer's shell read, for its owner alone."""
        self.keys_file.parent.mkdir(parents=True, exist_ok=True)
        self.keys_file.unlink(missing_ok=True)
        self.keys_file.touch(mode=0o600)
        self.keys_file.write_text("".join(f"export {name}={value}\n" for name, value in keys.items()))

    def describe(self) -> str:
        """What is to be there, one line each."""
        cost = "free" if self.hardware == FREE else "paid by the hour while it runs"
        return (
            f"bucket  {self.bucket}  (private; the run is {self.uri})\n"
            f"Space   {self.environment}  ({FREE}, free)\n"
            f"Space   {self.rollouts}  ({self.hardware}, {cost}; {self.model})"
        )

    def training_command(self, vllm: str, env: str) -> str:
        """What to paste into a shell on the trainer's machine, in this repository."""
        words = ["python", "-m", "examples.wordle.train", "--model", self.model, "--bucket", self.uri]
        words += ["--vllm", vllm, "--env", env, "--output", f"runs/{self.args.name}", *self.flavor.train.split()]
        return f". {shlex.quote(str(self.keys_file))} && {shlex.join(words)}"


def create(api: HfApi, plan: Plan, say: Callable[[str], None]) -> str:
    """Make or update everything, wait until it is healthy, and return the training command."""
    keys, new = plan.keys()
    token = os.environ.get(SPACE_TOKEN) or get_token()
    if not token:
        raise SpacesFailed("no token for the rollouts to read the bucket with. Remedy: hf auth login, or HF_TOKEN")
    if not os.environ.get(SPACE_TOKEN):
        say(f"note: {plan.rollouts} gets your own token as its secret; set {SPACE_TOKEN} to one that may do less")
    api.create_bucket(plan.bucket, private=True, exist_ok=True)
    spaces = plan.spaces(keys, token)
    for space in spaces:
        say(f"{space.repo}: settings and files")
        put(api, space, new)
    if new:  # only now: a run that was cut short makes new ones, and sets them everywhere
        plan.keep(keys)
    deadline = time.monotonic() + plan.args.timeout
    env, vllm = [wait(api, space, deadline, say) for space in spaces]
    return plan.training_command(vllm, env)


def put(api: HfApi, space: Space, new_keys: bool) -> None:
    """Bring one Space's settings and files up to date; what is so already is left, as every change restarts it."""
    paid = {} if space.hardware == FREE else {"space_hardware": space.hardware, "space_sleep_time": SLEEP}
    api.create_repo(
        space.repo,
        repo_type="space",
        space_sdk="docker",
        exist_ok=True,
        space_secrets=[{"key": key, "value": value} for key, value in space.secrets.items()],
        space_variables=[{"key": key, "value": value} for key, value in space.variables.items()],
        **paid,
    )
    known, variables = api.get_space_secrets(space.repo), api.get_space_variables(space.repo)
    for key, value in space.secrets.items():
        if new_keys or key not in known:
            api.add_space_secret(space.repo, key, value)
    for key, value in space.variables.items():
        if key not in variables or variables[key].value != value:
            api.add_space_variable(space.repo, key, value)
    if api.get_space_runtime(space.repo).requested_hardware not in (None, space.hardware):
        api.request_space_hardware(space.repo, space.hardware, sleep_time=SLEEP if paid else None)  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as folder:
        files = space.stage(Path(folder))
        wanted = {path.relative_to(files).as_posix(): path for path in sorted(files.rglob("*")) if path.is_file()}
        there = set(api.list_repo_files(space.repo, repo_type="space")) - {".gitattributes"}
        # one commit, where upload_folder would make several of many files: each is built, half a tree in vain
        api.create_commit(
            space.repo,
            [CommitOperationAdd(name, path) for name, path in wanted.items()]
            + [CommitOperationDelete(name) for name in sorted(there - wanted.keys())],
            repo_type="space",
            commit_message="delta-weight-sync: examples/wordle/spaces.py",
        )


def wait(api: HfApi, space: Space, deadline: float, say: Callable[[str], None]) -> str:
    """The URL of the Space once it is healthy and takes its key; SpacesFailed if it fails or the deadline passes."""
    stage, woken, url = "", False, ""
    hub = Patience(space.repo, deadline, say)
    while not url:
        runtime = hub.ask(lambda: api.get_space_runtime(space.repo))
        if runtime is not None and runtime.stage != stage:
            stage = runtime.stage
            say(f"{space.repo}: {stage.lower()}")
        if stage in FAILED:
            raise SpacesFailed(f"{space.repo}: {stage}. The end of its log:\n{_log(api, space.repo, stage)}")
        if stage in ASLEEP and not woken:
            woken = hub.ask(lambda: api.restart_space(space.repo)) is not None
        if stage == "RUNNING" and (info := hub.ask(lambda: api.space_info(space.repo))):
            url = str(info.host)
        elif time.monotonic() >= deadline:
            got = stage or "no answer from the Hub"
            raise SpacesFailed(
                f"{space.repo}: expected RUNNING in time, got {got}. Remedy: run this again, or raise --timeout"
            )
        else:
            time.sleep(POLL)
    wait_until_awake(url, space.key, max(0.0, deadline - time.monotonic()), probe=space.probe, new_key=True)
    say(f"{space.repo}: healthy at {url}")
    return url


def _log(api: HfApi, repo: str, stage: str) -> str:
    try:
        lines = list(api.fetch_space_logs(repo, build=stage != "RUNTIME_ERROR"))
    except (httpx2.HTTPError, OSError) as error:  # the Hub's own, too
        return f"(not to be had: {type(error).__name__}; try `hf spaces logs {repo}`)"
    return "\n".join("".join(lines).splitlines()[-LOG_LINES:])


def teardown(api: HfApi, plan: Plan, say: Callable[[str], None]) -> None:
    """Delete both Spaces, the bucket with everything that was trained, and the keys' file."""
    for repo in (plan.rollouts, plan.environment):
        api.delete_repo(repo, repo_type="space", missing_ok=True)
        say(f"{repo}: gone")
    api.delete_bucket(plan.bucket, missing_ok=True)
    plan.keys_file.unlink(missing_ok=True)
    say(f"{plan.bucket}: gone, and {plan.keys_file}")


def confirmed(question: str) -> bool:
    """Whether somebody at a terminal says yes."""
    return sys.stdin.isatty() and input(f"{question} [y/N] ").strip().lower() in ("y", "yes")


def parse_args(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--owner", help="user or organisation (default: who you are logged in as)")
    parser.add_argument("--name", default="wordle", help="the bucket's name and the start of the Spaces'")
    parser.add_argument("--run", default="run-1", help="the run's folder in the bucket")
    parser.add_argument("--flavor", choices=sorted(FLAVORS), default="gpu")
    parser.add_argument("--model", help="what to serve and train (gpu: Qwen3-1.7B, cpu: SmolLM2-135M-Instruct)")
    parser.add_argument("--hardware", help="the rollouts' (gpu: l4x1, cpu: cpu-basic)")
    parser.add_argument("--vllm-args", help="more arguments of `vllm serve`, as one word")
    parser.add_argument("--keys", type=Path, help="file that keeps the Spaces' keys (default: runs/NAME.env)")
    parser.add_argument("--new-keys", action="store_true", help="make new keys, and set the Spaces' secrets anew")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds until both must be healthy")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, and do nothing")
    parser.add_argument("--teardown", action="store_true", help="delete both Spaces and the bucket")
    parser.add_argument("--yes", action="store_true", help="do not ask before deleting")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    """Exit code 0: done; 1: failed; 2: not confirmed; 130: stopped by Ctrl-C."""
    args = parse_args(words)
    say = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731  # stdout is the training command alone
    try:
        api = HfApi()
        plan = Plan(args, args.owner or api.whoami()["name"])
        say(("to be deleted:\n" if args.teardown else "to be there:\n") + plan.describe())
        if args.dry_run:
            return 0
        if not args.teardown:
            print(create(api, plan, say))
            return 0
        if not args.yes and not confirmed("Delete all of it, the trained weights too?"):
            say("nothing was deleted; say --yes to delete without being asked")
            return 2
        teardown(api, plan, say)
    except (SpacesFailed, NotAwake, LocalTokenNotFoundError) as error:
        say(f"failed: {error}")
        return 1
    except HfHubHTTPError as error:
        say(f"failed: {_of_the_hub(error)}")
        return 1
    except (httpx2.HTTPError, OSError) as error:
        say(f"failed: {type(error).__name__}: {error}. Remedy: {_of_the_way(error)}")
        return 1
    except KeyboardInterrupt:
        say("stopped; what was done stays: run this again to go on")
        return 130
    return 0


def _of_the_way(error: Exception) -> str:
    if isinstance(error, httpx2.HTTPError):
        return "is the network up, and HF_ENDPOINT right? What was done stays: run this again to go on"
    return "see that this file may be read and written, or name another with --keys"


def _of_the_hub(error: HfHubHTTPError) -> str:
    status = error.response.status_code if error.response is not None else None
    remedy = {
        401: "Remedy: hf auth login with a token that may write",
        402: "Remedy: a payment method or plan on your account (Settings, Billing), or --flavor cpu",
        403: "Remedy: a token that may write to this owner's repositories, or another --owner",
    }
    return f"{error} {remedy.get(status or 0, '')}".strip()


if __name__ == "__main__":
    sys.exit(main())
