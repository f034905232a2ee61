"""Rollouts and environment as two Hugging Face Spaces, and the bucket between them and your trainer.

    python -m examples.wordle.spaces                       # create or update, wait until healthy, say how to train
    python -m examples.wordle.spaces --flavor cpu          # the smallest: a 135M model, no GPU
    python -m examples.wordle.spaces --dry-run             # say what would be done
    python -m examples.wordle.spaces --teardown            # delete both Spaces, the run and its bucket

You must be logged in (`hf auth login`, or HF_TOKEN). Hardware other than cpu-basic costs money while a Space runs.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx2
from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

from examples.wordle.space_bucket import delete_run, make_private_bucket
from examples.wordle.space_files import ROOT, stage_environment, stage_rollouts
from examples.wordle.space_repo import FREE, Space, SpacesFailed, ours, put, refuse_foreign
from examples.wordle.space_wait import wait
from examples.wordle.wake import NotAwake

SPACE_TOKEN = "SPACE_HF_TOKEN"
SMALL = "--enforce-eager --max-model-len 1024 --max-num-seqs 9"


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
    token = os.environ.get(SPACE_TOKEN, "").strip() or get_token()
    if not token:
        raise SpacesFailed("no token for the rollouts to read the bucket with. Remedy: hf auth login, or HF_TOKEN")
    if not os.environ.get(SPACE_TOKEN):
        say(f"note: {plan.rollouts} gets your own token as its secret; set {SPACE_TOKEN} to one that may do less")
    for repo in (plan.environment, plan.rollouts):  # both, before anything is made
        refuse_foreign(api, repo)
    make_private_bucket(api, plan.bucket)
    uploads = []
    for space in plan.spaces(keys, token):
        say(f"{space.repo}: settings and files")
        uploads.append((space, put(api, space, new)))
    if new:  # only now: a run that was cut short makes new ones, and sets them everywhere
        plan.keep(keys)
    deadline = time.monotonic() + plan.args.timeout
    env, vllm = [wait(api, space, upload, deadline, say) for space, upload in uploads]
    return plan.training_command(vllm, env)


def teardown(api: HfApi, plan: Plan, say: Callable[[str], None]) -> None:
    """Delete both Spaces, the run, the bucket if nothing else is in it, and the keys' file: what this example made."""
    for repo in (plan.rollouts, plan.environment):
        if ours(api, repo) is False:
            say(f"{repo}: kept, as this example did not make it")
            continue
        api.delete_repo(repo, repo_type="space", missing_ok=True)
        say(f"{repo}: gone")
    say(delete_run(api, plan.bucket, plan.args.run))
    plan.keys_file.unlink(missing_ok=True)
    say(f"{plan.keys_file}: gone")


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
    parser.add_argument(
        "--teardown", action="store_true", help="delete both Spaces, the run, and the bucket if it holds nothing else"
    )
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
