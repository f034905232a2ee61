"""Calls to the Hub's bucket API: every one has a deadline, and every refusal says what to do.

The stock client is not used for them: its requests have no time limit, its retries know no deadline, and both can only
be changed for the whole process. What is sent is what ``HfApi`` sends, and a test holds the two against each other.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

import httpx2
from huggingface_hub import constants, get_token
from huggingface_hub.utils import parse_ratelimit_headers

from delta_sync.bearer import bearer
from delta_sync.deadline import StillRunningError, within
from delta_sync.errors import StoreError
from delta_sync.store.attempts import Again, Deadline, retrying
from delta_sync.strict_json import clip

RATE_WINDOW = 320.0  # seconds; the Hub counts requests over 300
CONNECT_SECONDS, ANSWER_SECONDS = 10.0, 20.0
ANSWER_BYTES = 64 << 20  # a page of a listing has some hundred kB
_FRAMING = ("content-encoding", "transfer-encoding")
_PASSING = (408, 425, 500, 502, 503, 504)
_REDIRECTS = 3
_RATE_REMEDY = (
    "fewer replicas or publishes on this token, or a plan with higher limits; docs/STORES-HUB.md has the sums"
)


class HubClient:
    """One bucket's API.

    The token is looked up anew for each call: the variable ``token_from``, HF_TOKEN, what ``hf auth login`` keeps.
    """

    def __init__(self, bucket: str, endpoint: str | None = None, token_from: str | None = None) -> None:
        self.bucket, self._token_from = bucket, token_from
        self.endpoint = (endpoint or os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")
        self.api = f"{self.endpoint}/api/buckets/{bucket}"
        self._closed_until = {"api": 0.0, "resolvers": 0.0}  # by budget: when the Hub answers again after a 429
        self._lock = threading.Lock()
        self._opened: tuple[int, httpx2.Client] | None = None

    def resolve_url(self, path: str) -> str:
        """Where one file's metadata is asked for; counts against the larger of the two rate limits."""
        return f"{self.endpoint}/buckets/{self.bucket}/resolve/{quote(path, safe='')}"

    def call(
        self,
        method: str,
        url: str,
        deadline: Deadline,
        *,
        doing: str,
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        expected: tuple[int, ...] = (200,),
    ) -> httpx2.Response:
        """One request, repeated while that may help; StoreError unless the status is ``expected``."""

        def attempt() -> httpx2.Response:
            self._wait_for_budget(url, deadline, doing)
            try:
                response = self._send(method, url, deadline, content, headers)
            except httpx2.HTTPError as error:
                raise Again(self._unreachable(doing, error)) from error
            if response.status_code not in expected:
                raise self.refusal(response, doing)
            _check_json(response, doing)
            return response

        return retrying(deadline, attempt)

    @contextmanager
    def stream(self, url: str, params: Mapping[str, str], silence: float, doing: str) -> Iterator[httpx2.Response]:
        """A response of any status, read as it comes; httpx2.HTTPError after ``silence`` seconds without a byte."""
        self._wait_for_budget(url, Deadline(RATE_WINDOW), doing)
        timeout = httpx2.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS, read=silence)
        headers = {**self.headers(), "Accept": "text/event-stream"}
        with self._client().stream("GET", url, params=params, headers=headers, timeout=timeout) as response:
            yield response

    def headers(self) -> dict[str, str]:
        """Who is asking; holds the token."""
        token = self._token()
        return {"User-Agent": "delta-weight-sync"} | ({"Authorization": bearer(token)} if token else {})

    def _token(self) -> str | None:
        return os.environ.get(self._token_from or "") or get_token()

    def _send(
        self, method: str, url: str, deadline: Deadline, content: bytes | None, more: Mapping[str, str] | None
    ) -> httpx2.Response:
        """One request; follows redirects within the Hub, as after renaming a bucket, and never takes the token out."""
        for _ in range(_REDIRECTS):
            seconds = max(0.1, min(ANSWER_SECONDS, deadline.left))
            timeout = httpx2.Timeout(seconds, connect=min(CONNECT_SECONDS, seconds))
            headers = {**self.headers(), "Accept-Encoding": "identity", **(more or {})}
            request = self._client().build_request(method, url, content=content, headers=headers, timeout=timeout)
            response = self._answer(request, deadline)
            target = urljoin(url, response.headers.get("location", ""))
            answered = not response.is_redirect or "x-xet-hash" in response.headers
            if answered or urlsplit(target)[:2] != urlsplit(url)[:2]:  # another scheme or host is not given the token
                break
            url = target
        return response

    def _answer(self, request: httpx2.Request, deadline: Deadline) -> httpx2.Response:
        """The whole answer, of at most ANSWER_BYTES; the client's own limits lie between two reads."""

        def read() -> httpx2.Response:
            response = self._client().send(request, stream=True)
            try:
                body = bytearray()
                for part in response.iter_raw():
                    body += part
                    if len(body) > ANSWER_BYTES or deadline.left <= 0:
                        raise httpx2.ReadError(f"no end after {len(body)} bytes")
            finally:
                response.close()
            headers = [(k, v) for k, v in response.headers.multi_items() if k.lower() not in _FRAMING]
            return httpx2.Response(response.status_code, headers=headers, content=bytes(body), request=request)

        try:
            return within(deadline.left, read)
        except StillRunningError as error:
            raise httpx2.ReadTimeout("the answer did not end in time") from error

    def _client(self) -> httpx2.Client:
        with self._lock:
            if self._opened is None or self._opened[0] != os.getpid():  # a fork must not share its parent's connections
                self._opened = os.getpid(), httpx2.Client(limits=httpx2.Limits(max_keepalive_connections=8))
            return self._opened[1]

    def _wait_for_budget(self, url: str, deadline: Deadline, doing: str) -> None:
        """After a 429 no thread asks again before the Hub's own time is over."""
        wait = self._closed_until[_budget(url)] - time.monotonic()
        if wait <= 0:
            return
        if wait >= deadline.left:
            raise _rate_limited(doing, wait)
        time.sleep(wait)

    def _unreachable(self, doing: str, error: httpx2.HTTPError) -> StoreError:
        got = f"{type(error).__name__}: {error}"
        host = urlsplit(self.endpoint).hostname
        remedy = f"try again; if it stays, check the network and https://status.huggingface.co (asked: {host})"
        return StoreError(doing, expected="an answer in time", got=got, remedy=remedy)

    def refusal(self, response: httpx2.Response, doing: str) -> Exception:
        """What a status means: Again where waiting may help, else StoreError with what to do."""
        status = response.status_code
        if status == 429:
            wait = _seconds_to_wait(response.headers)
            budget = _budget(str(response.request.url))
            self._closed_until[budget] = max(self._closed_until[budget], time.monotonic() + wait)
            return Again(_rate_limited(doing, wait))
        error = StoreError(doing, expected="success", got=_said(response), remedy=self._remedy(response))
        return Again(error, _seconds_to_wait(response.headers, 0.0)) if status in _PASSING else error

    def _remedy(self, response: httpx2.Response) -> str:
        status = response.status_code
        if response.headers.get("x-error-code") == "RepoNotFound" or status == 404:
            sign_in = "" if self._token() else ", and log in if it is private (`hf auth login` or HF_TOKEN)"
            return f"check the name {self.bucket}, create it with `hf buckets create {self.bucket} --private`{sign_in}"
        if status == 401:
            if self._token() is None:
                return "give a token: `hf auth login`, or HF_TOKEN in the environment"
            return "the token is not valid (any more): make a new one at https://huggingface.co/settings/tokens"
        if status == 403:
            return f"use a token that may write to {self.bucket}, as trainers and replicas that report must; else read"
        return "try again; if it stays, look at https://status.huggingface.co"


def _check_json(response: httpx2.Response, doing: str) -> None:
    """An answer cut short or damaged on its way is worth another try."""
    if not response.content or not response.headers.get("content-type", "").startswith("application/json"):
        return
    try:
        response.json()
    except ValueError as error:
        raise Again(StoreError(doing, expected="JSON", got=_said(response), remedy="try again")) from error


def _budget(url: str) -> str:
    return "resolvers" if "/resolve/" in urlsplit(url).path else "api"


def _seconds_to_wait(headers: Mapping[str, str], default: float = 5.0) -> float:
    """What RateLimit or Retry-After ask for."""
    limit = parse_ratelimit_headers(headers)
    if limit is not None and limit.remaining == 0:
        return float(limit.reset_in_seconds)
    try:
        return max(0.0, float(headers.get("retry-after", default)))
    except ValueError:  # a date
        return default


def _rate_limited(doing: str, wait: float) -> StoreError:
    got = f"429, the rate limit is used up for {wait:.0f} s"
    return StoreError(doing, expected="success", got=got, remedy=_RATE_REMEDY)


def _said(response: httpx2.Response) -> str:
    """The status and, clipped, why."""
    said = response.headers.get("x-error-message", "")
    if not said:
        with suppress(ValueError):  # a proxy's page: the status says it
            body: Any = json.loads(response.content)
            said = str(body.get("error", "")) if isinstance(body, dict) else ""
    return f"status {response.status_code}{': ' + clip(said, 200) if said else ''}"
