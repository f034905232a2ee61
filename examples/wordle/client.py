"""A client for any OpenEnv Wordle: ours, TextArena's, or a Space, by URL.

with WordleClient("http://127.0.0.1:8000") as wordle:
    turn = wordle.reset(seed=7)
    turn = wordle.guess("crane")
    print(turn.feedback, turn.marks, turn.reward, turn.done)
"""

from __future__ import annotations

import json
import random
import re
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import urlsplit, urlunsplit

from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException
from websockets.sync.client import ClientConnection, connect

MESSAGE_LIMIT = 16 * 2**20  # bytes; a transcript is a few kB
LOCAL_HOSTS = {"localhost", "127.0.0.1", "::1"}
MARKS = re.compile(r"Feedback:\s*\n(?P<letters>[A-Z](?: [A-Z])*)\n(?P<marks>[GYX](?: [GYX])*)")


class WordleServerError(RuntimeError):
    """The environment server answered with an error, or not at all."""

    def __init__(self, url: str, problem: str, code: str = "", remedy: str = "") -> None:
        self.code = code
        shown = f"Wordle server {url}: {problem}" + (f" ({code})" if code else "")
        super().__init__(f"{shown}. Remedy: {remedy}" if remedy else shown)


@dataclass(frozen=True)
class Turn:
    """What one reset or guess brought: the new text, the marks of an accepted guess ("GYXXG"), the reward."""

    feedback: str
    marks: str | None
    reward: float
    done: bool
    signals: dict[str, float] = field(default_factory=dict)


class WordleClient:
    """One session on an OpenEnv Wordle server, over its WebSocket; connects at the first reset, and again if cut.

    `token` is sent as a Bearer token. `slot_timeout` is how many seconds reset waits for a free session on a server
    that is full, `wake_timeout` on one that can't be reached, as a Space that wakes up; with it, a game with a seed is
    played up to where it was when its server was restarted. Raises WordleServerError.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        timeout: float = 60.0,
        slot_timeout: float = 120.0,
        wake_timeout: float = 0.0,
    ) -> None:
        self.url, self._timeout = url, timeout
        self._patience = {"CAPACITY_REACHED": slot_timeout, "CLOSED": slot_timeout, "UNREACHABLE": wake_timeout}
        self._socket_url = websocket_url(url)
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._socket: ClientConnection | None = None
        self._open = ExitStack()  # holds the connection; websockets wants it entered as a context
        self._transcript = ""
        self._seed: int | None = None
        self._said: list[str] = []

    def reset(self, seed: int | None = None) -> Turn:
        """Start a new game; a server may ignore the seed (TextArena's does)."""
        data = {} if seed is None else {"seed": seed}
        started = time.monotonic()
        pause = 0.25
        while True:
            try:
                self._transcript, self._seed, self._said = "", seed, []
                return self._turn(self._ask({"type": "reset", "data": data}))
            except WordleServerError as error:
                self.close()
                if time.monotonic() + pause > started + self._patience.get(error.code, 0.0):
                    raise
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(4.0, pause * 2)

    def guess(self, word: str) -> Turn:
        """Play one word; brackets are added, so that "crane" and "[crane]" are the same guess."""
        return self.say(f"[{word.strip().strip('[]')}]")

    def say(self, message: str) -> Turn:
        """Send a message as it is, with the guess in square brackets somewhere in it."""
        try:
            turn = self._step(message)
        except WordleServerError as error:
            cut = error.code in ("CLOSED", "UNREACHABLE") and self._patience["UNREACHABLE"] > 0
            if not cut or self._seed is None:
                raise
            turn = self._resume(message, self._seed)
        self._said.append(message)
        return turn

    def _step(self, message: str) -> Turn:
        return self._turn(self._ask({"type": "step", "data": {"message": message}}))

    def _resume(self, message: str, seed: int) -> Turn:
        """Play the same game again up to here, on a server that came back, and then the message."""
        said, known = self._said, self._transcript
        self.reset(seed)
        for earlier in said:
            self._step(earlier)
        if self._transcript != known:
            remedy = "reset again; a server that honours seeds could have gone on"
            raise WordleServerError(self.url, "the session was lost, and its seed drew another game", "CLOSED", remedy)
        self._said = said
        return self._step(message)

    def close(self) -> None:
        """End the session; closing twice is fine."""
        self._socket = None
        self._open.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _connected(self) -> ClientConnection:
        if self._socket is None:
            direct: dict[str, Any] = {"proxy": None} if urlsplit(self._socket_url).hostname in LOCAL_HOSTS else {}
            try:
                connecting = connect(
                    self._socket_url,
                    additional_headers=self._headers,
                    open_timeout=self._timeout,
                    close_timeout=2.0,
                    max_size=MESSAGE_LIMIT,
                    **direct,
                )
                self._socket = self._open.enter_context(connecting)
            except (OSError, WebSocketException, TimeoutError) as error:
                refused = isinstance(error, InvalidStatus) and error.response.status_code in (401, 403, 404)
                raise WordleServerError(
                    self.url,
                    f"no connection ({error})",
                    "REFUSED" if refused else "UNREACHABLE",
                    "check the URL, the token, and that the server runs",
                ) from error
        return self._socket

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        socket = self._connected()
        try:
            answer = self._receive_after(socket, message)
        except TimeoutError as error:
            self.close()
            raise WordleServerError(self.url, f"no answer within {self._timeout} s to {message['type']}") from error
        if answer.get("type") == "error":
            data = answer.get("data", {})
            raise WordleServerError(self.url, str(data.get("message")), str(data.get("code", "")))
        return dict(answer.get("data", {}))

    def _receive_after(self, socket: ClientConnection, message: dict[str, Any]) -> dict[str, Any]:
        with suppress(ConnectionClosed):  # a full server says why before it closes: its last words are still to be read
            socket.send(json.dumps(message))
        try:
            return dict(json.loads(socket.recv(timeout=self._timeout)))
        except ConnectionClosed as error:
            self.close()
            raise WordleServerError(self.url, f"the session was closed ({error})", "CLOSED", "reset again") from error

    def _turn(self, data: dict[str, Any]) -> Turn:
        observation = data.get("observation", {})
        transcript = "\n".join(message["content"] for message in observation.get("messages", ()))
        new = transcript.removeprefix(self._transcript).strip()
        self._transcript = transcript
        marks = MARKS.findall(new)
        return Turn(
            feedback=new,
            marks=marks[-1][1].replace(" ", "") if marks else None,
            reward=float(data.get("reward") or 0.0),
            done=bool(data.get("done")),
            signals=dict(observation.get("info", {}).get("reward_signals", {})),
        )


def websocket_url(url: str) -> str:
    """ws(s)://host/…/ws of an http(s) or ws(s) URL."""
    parts = urlsplit(url)
    schemes = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
    if parts.scheme not in schemes or not parts.hostname:
        raise ValueError(f"environment URL: expected http(s)://host[:port], got {url!r}")
    path = parts.path.rstrip("/")
    return urlunsplit((schemes[parts.scheme], parts.netloc, path if path.endswith("/ws") else f"{path}/ws", "", ""))
