"""One Space's repository on the Hub: whose it is, its settings and its files."""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

FREE = "cpu-basic"
SLEEP = 3600  # seconds without a request after which paid hardware is let go; a rollout is a request
MADE_BY = ("MADE_BY", "delta-weight-sync/examples/wordle")  # a variable: there from the moment that a Space is
MOVING = ("BUILDING", "RUNNING_BUILDING", "APP_STARTING", "RUNNING_APP_STARTING")


class SpacesFailed(RuntimeError):
    """A Space or the bucket could not be made or did not get up; the message says which, and what to do."""


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


@dataclass(frozen=True)
class Upload:
    """What a Space is to run: ``commit``, and ``fresh`` if whatever runs it has this run's settings, too."""

    commit: str
    fresh: bool
    at: float = field(default_factory=time.monotonic)


def ours(api: HfApi, repo: str) -> bool | None:
    """Whether this example made the Space, by the variable that says so; None if there is no such Space."""
    if not api.repo_exists(repo, repo_type="space"):
        return None
    variables, (name, value) = api.get_space_variables(repo), MADE_BY
    return name in variables and variables[name].value == value


def refuse_foreign(api: HfApi, repo: str) -> None:
    """SpacesFailed if the Space is there and somebody else's: its files would be replaced."""
    if ours(api, repo) is False:
        raise SpacesFailed(
            f"{repo}: expected no Space, or one with the variable {'='.join(MADE_BY)} (made by this example), got "
            "another one. Remedy: another --name; or set that variable in its settings, if its files may be replaced"
        )


def put(api: HfApi, space: Space, anew: bool) -> Upload:
    """Bring one Space's settings and files up to date; what is so already is left, as every change restarts it."""
    paid = {} if space.hardware == FREE else {"space_hardware": space.hardware, "space_sleep_time": SLEEP}
    variables = {**space.variables, MADE_BY[0]: MADE_BY[1]}
    api.create_repo(
        space.repo,
        repo_type="space",
        space_sdk="docker",
        exist_ok=True,
        space_secrets=[{"key": k, "value": v, "description": _fingerprint(v)} for k, v in space.secrets.items()],
        space_variables=[{"key": key, "value": value} for key, value in variables.items()],
        **paid,
    )
    changed = _set_secrets(api, space, anew) + _set_variables(api, space.repo, variables)
    before = api.get_space_runtime(space.repo)
    if before.requested_hardware not in (None, space.hardware):
        api.request_space_hardware(space.repo, space.hardware, sleep_time=SLEEP if paid else None)  # type: ignore[arg-type]
        changed += 1
    commit = _upload(api, space)
    # A new commit is built after all of the above; the one that runs already restarts, if something of it changed.
    return Upload(commit, fresh=before.raw.get("sha") != commit or not changed or before.stage in MOVING)


def _fingerprint(secret: str) -> str:
    """A secret's description, which alone can be read back, to those who may write: it tells which value is there.

    Secrets here are long and random, so that a hash gives nothing away. Somebody who changes one by hand and leaves its
    description is not noticed; --new-keys sets all anew.
    """
    return f"set by delta-weight-sync, sha256 {hashlib.sha256(secret.encode()).hexdigest()[:12]}"


def _set_secrets(api: HfApi, space: Space, anew: bool) -> int:
    known, changed = api.get_space_secrets(space.repo), 0
    for key, value in space.secrets.items():
        if anew or key not in known or known[key].description != _fingerprint(value):
            api.add_space_secret(space.repo, key, value, description=_fingerprint(value))
            changed += 1
    return changed


def _set_variables(api: HfApi, repo: str, wanted: dict[str, str]) -> int:
    known, changed = api.get_space_variables(repo), 0
    for key, value in wanted.items():
        if key not in known or known[key].value != value:
            api.add_space_variable(repo, key, value)
            changed += 1
    return changed


def _upload(api: HfApi, space: Space) -> str:
    with tempfile.TemporaryDirectory() as folder:
        files = space.stage(Path(folder))
        wanted = {path.relative_to(files).as_posix(): path for path in sorted(files.rglob("*")) if path.is_file()}
        there = set(api.list_repo_files(space.repo, repo_type="space")) - {".gitattributes"}
        # one commit, where upload_folder would make several of many files: each is built, half a tree in vain
        commit = api.create_commit(
            space.repo,
            [CommitOperationAdd(name, path) for name, path in wanted.items()]
            + [CommitOperationDelete(name) for name in sorted(there - wanted.keys())],
            repo_type="space",
            commit_message="delta-weight-sync: examples/wordle/spaces.py",
        )
        return str(commit.oid)  # of the newest commit, where nothing differs
