"""Waiting for a Space: for the build of what was uploaded, not for one before it."""

from __future__ import annotations

import time
from collections.abc import Callable

import httpx2
from huggingface_hub import HfApi, SpaceRuntime

from examples.wordle.patience import Patience
from examples.wordle.space_repo import MOVING, Space, SpacesFailed, Upload
from examples.wordle.wake import wait_until_awake

POLL = 2.0  # seconds
SETTLE = 60.0  # seconds after an upload in which a stage that does not move may be a leftover
LOG_LINES = 15
FAILED = ("BUILD_ERROR", "CONFIG_ERROR", "RUNTIME_ERROR", "NO_APP_FILE", "DELETING")
ASLEEP = ("PAUSED", "STOPPED", "SLEEPING")


class Build:
    """Tells whether what the Hub says of a Space is about the upload.

    A runtime's ``sha`` is in no documentation. As others have seen it, it is the commit that the serving container was
    built from: the old one while a new one builds, the new one once it runs. What it is after a failed build nobody
    says, and a restart leaves it as it was; then the best evidence is that the stage moved, or stayed for long.
    """

    def __init__(self, upload: Upload) -> None:
        self._upload, self._moved = upload, False

    def judges(self, runtime: SpaceRuntime) -> bool:
        """Whether this stage, RUNNING or a failure, is the uploaded build's."""
        self._moved |= runtime.stage in MOVING
        if self.other(runtime) and runtime.stage == "RUNNING":
            return False
        if runtime.raw.get("sha") == self._upload.commit and self._upload.fresh:
            return True
        return self._moved or time.monotonic() - self._upload.at >= SETTLE

    def other(self, runtime: SpaceRuntime) -> bool:
        """Whether the Hub names another commit than the uploaded one."""
        return runtime.raw.get("sha") not in (None, self._upload.commit)


def wait(api: HfApi, space: Space, upload: Upload, deadline: float, say: Callable[[str], None]) -> str:
    """The URL of the Space once it is healthy and takes its key; SpacesFailed if it fails or the deadline passes."""
    stage, woken, url, got = "", False, "", "no answer from the Hub"
    hub, build = Patience(space.repo, deadline, say), Build(upload)
    while not url:
        runtime = hub.ask(lambda: api.get_space_runtime(space.repo))
        counts = runtime is not None and build.judges(runtime)
        if runtime is not None:
            got = f"{runtime.stage} of the build before" if build.other(runtime) else runtime.stage
            if runtime.stage != stage:
                stage = runtime.stage
                say(f"{space.repo}: {stage.lower()}")
        if counts and stage in FAILED:
            raise SpacesFailed(f"{space.repo}: {stage}. The end of its log:\n{_log(api, space.repo, stage)}")
        if stage in ASLEEP and not woken:
            woken = hub.ask(lambda: api.restart_space(space.repo)) is not None
        if counts and stage == "RUNNING" and (info := hub.ask(lambda: api.space_info(space.repo))):
            url = str(info.host)
        elif time.monotonic() >= deadline:
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
