"""Waiting until a server that may be asleep answers: a request wakes a Space, and minutes pass until it is up."""

from __future__ import annotations

import sys
import time
from urllib.parse import urlsplit

import httpx

from delta_sync.bearer import bearer
from delta_sync.errors import FormatError

POLL = 2.0  # seconds
TELL = 15.0  # seconds between two words about waiting
REFUSED = "its refusal of the key"


class NotAwake(RuntimeError):
    """The server did not get up in time, or does not take the key."""


def wait_until_awake(url: str, key: str | None, timeout: float, *, probe: str, new_key: bool = False) -> None:
    """Return once /health answers 200 and the route ``probe`` takes the key; NotAwake after ``timeout`` seconds.

    A refused key is not waited for, unless it is new: a server that still has the old one is about to restart.
    """
    started, told = time.monotonic(), 0.0
    try:
        headers = {"Authorization": bearer(key)} if key else {}
    except FormatError as error:
        raise NotAwake(f"{url}: {error}") from None
    local = (urlsplit(url).hostname or "") in ("localhost", "127.0.0.1", "::1")
    with httpx.Client(timeout=10, headers=headers, trust_env=not local) as client:
        while trouble := _trouble(client, url.rstrip("/"), probe):
            waited = time.monotonic() - started
            if trouble == REFUSED and not (new_key and waited < timeout):
                raise NotAwake(
                    f"{url}: expected the key to be taken, got {trouble}. Remedy: VLLM_API_KEY (rollouts) or "
                    "WORDLE_ENV_TOKEN (environment) must be the Space's secret of that name"
                )
            if waited >= timeout:
                raise NotAwake(
                    f"{url}: expected a healthy server within {timeout:g} s, got {trouble}. Remedy: is the URL right? "
                    "Look at the Space's page: a sleeping one was woken by this, a paused or failed one needs "
                    "`hf spaces restart OWNER/NAME`, and `hf spaces logs OWNER/NAME` says why it failed"
                )
            if waited - told >= TELL:
                told = waited
                print(f"waiting for {url} ({waited:.0f} of {timeout:g} s): {trouble}", file=sys.stderr, flush=True)
            time.sleep(min(POLL, timeout - waited))


def _trouble(client: httpx.Client, url: str, probe: str) -> str | None:
    try:
        answer = client.get(f"{url}/health")
        if answer.status_code == 200 and client.get(f"{url}{probe}").status_code in (401, 403):
            return REFUSED
    except httpx.UnsupportedProtocol:
        raise NotAwake(f"{url}: expected http://HOST or https://HOST, got neither. Remedy: begin with one") from None
    except httpx.HTTPError as error:
        return f"{type(error).__name__} ({error})"
    if answer.status_code == 200 and "text/html" in answer.headers.get("Content-Type", ""):
        return "a web page"  # of a proxy in between, about a server that is not up
    return None if answer.status_code == 200 else f"HTTP {answer.status_code}"
