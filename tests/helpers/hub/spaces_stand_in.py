"""Stands in for the Hub's Spaces, as far as the unmodified HfApi asks for them: a repository, settings and a stage.

What "builds" a Space is the caller's: ``build`` gets it after every commit, sets its host, and returns its next stage.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from helpers.hub.wire import Answer, Request, as_json, refusal


@dataclass
class SpaceStandIn:
    """One Space; secrets can be set, named and described but, as on the Hub, not read over HTTP."""

    id: str
    files: dict[str, bytes] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict)
    descriptions: dict[str, str | None] = field(default_factory=dict)  # of the secrets
    variables: dict[str, str] = field(default_factory=dict)
    hardware: str = "cpu-basic"
    sleep_time: int | None = None
    stage: str = "NO_APP_FILE"
    built: str | None = None  # the commit that what runs was built from
    host: str = ""
    commits: int = 0
    restarts: int = 0
    log: str = ""

    def runtime(self) -> dict[str, Any]:
        hardware = {"current": self.hardware, "requested": self.hardware}
        known = {"sha": self.built} if self.built else {}
        return {"stage": self.stage, "hardware": hardware, "gcTimeout": self.sleep_time, "storage": None, **known}

    @property
    def head(self) -> str:
        return f"{self.commits:040d}"

    def info(self) -> dict[str, Any]:
        return {"id": self.id, "sha": self.head, "host": self.host, "runtime": self.runtime()}

    def tree(self) -> list[dict[str, Any]]:
        return [
            {"type": "file", "path": path, "size": len(data), "oid": _git_oid(data)}
            for path, data in self.files.items()
        ]


class SpacesStandIn:
    """All Spaces of a TestHub, by id."""

    def __init__(self) -> None:
        self.spaces: dict[str, SpaceStandIn] = {}
        self.build: Callable[[SpaceStandIn], str] = lambda space: "RUNNING"
        self.lag = 0.0  # seconds until a stage shows that something is about to be built
        self.building = 0.3  # seconds that it shows it, at least
        self.paid = True  # whether the account may have other hardware than cpu-basic

    def answer(self, request: Request, right: str) -> Answer | None:
        """The answer to a request about Spaces, None for any other; a token that may not write may look."""
        path = request.path
        if path == "/api/validate-yaml":
            return as_json({"errors": [], "warnings": []})
        found = re.fullmatch(r"/api/spaces/([^/]+/[^/]+)(?:/(.+))?", path)
        if found is None and path not in ("/api/repos/create", "/api/repos/delete"):
            return None
        if not right or (right != "write" and request.method != "GET"):
            return refusal(401, "", "Invalid username or password.")
        if found is None:
            return self._create(request) if path.endswith("create") else self._delete(request)
        space = self.spaces.get(found[1])
        if space is None:
            return refusal(404, "RepoNotFound", "Repository not found")
        return self._call(space, request, found[2] or "")

    def _create(self, request: Request) -> Answer:
        body = request.json()
        space_id = _id(body)
        url = {"url": f"{request.base}/spaces/{space_id}"}
        if space_id in self.spaces:
            return as_json({**url, "error": "You already created this space repo"}, 409)
        hardware = body.get("hardware") or "cpu-basic"
        if hardware != "cpu-basic" and not self.paid:
            return refusal(402, "", "Payment required")
        space = SpaceStandIn(space_id, hardware=hardware, sleep_time=body.get("sleepTimeSeconds"))
        space.secrets = {pair["key"]: pair["value"] for pair in body.get("secrets", ())}
        space.descriptions = {pair["key"]: pair.get("description") for pair in body.get("secrets", ())}
        space.variables = {pair["key"]: pair["value"] for pair in body.get("variables", ())}
        self.spaces[space_id] = space
        return as_json(url)

    def _delete(self, request: Request) -> Answer:
        if self.spaces.pop(_id(request.json()), None) is None:
            return refusal(404, "RepoNotFound", "Repository not found")
        return as_json({})

    def _call(self, space: SpaceStandIn, request: Request, rest: str) -> Answer:
        match request.method, rest.split("/")[0]:
            case "GET", "" | "revision":
                return as_json(space.info())
            case "GET", "runtime":
                return as_json(space.runtime())
            case "GET", "tree":
                return as_json(space.tree())
            case "GET", "secrets":
                row = {"updatedAt": "2025-01-01T00:00:00.000Z"}
                return as_json(
                    {key: {"key": key, "description": space.descriptions.get(key), **row} for key in space.secrets}
                )
            case "GET", "variables":
                return as_json({key: {"key": key, "value": value} for key, value in space.variables.items()})
            case "GET", "logs":
                line = json.dumps({"data": space.log, "timestamp": "2025-01-01T00:00:00.000Z"})
                return Answer(200, f"data: {line}\n\n".encode(), {"Content-Type": "text/event-stream"})
            case "POST", "secrets" | "variables" as kind:
                body = request.json()
                getattr(space, kind)[body["key"]] = body["value"]
                if kind == "secrets":
                    space.descriptions[body["key"]] = body.get("description")
                if space.commits:
                    self._start(space)
                return as_json({key: {"key": key, "value": value} for key, value in space.variables.items()})
            case "POST", "hardware":
                space.hardware = request.json()["flavor"]
                space.sleep_time = request.json().get("sleepTimeSeconds", space.sleep_time)
                return as_json(space.runtime())
            case "POST", "restart":
                space.restarts += 1
                self._start(space)
                return as_json(space.runtime())
            case "POST", "preupload":
                return as_json({"files": [_regular(space, file) for file in request.json()["files"]]})
            case "POST", "commit":
                return self._commit(space, request)
        return Answer(404)

    def _commit(self, space: SpaceStandIn, request: Request) -> Answer:
        for line in map(json.loads, request.body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                space.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "deletedFile":
                del space.files[value["path"]]
        space.commits += 1
        self._start(space)
        return as_json({"commitUrl": f"{request.base}/spaces/{space.id}/commit/1", "commitOid": space.head})

    def _start(self, space: SpaceStandIn) -> None:
        if not self.lag:
            space.stage = "BUILDING"
        threading.Thread(target=self._build, args=(space, space.head), daemon=True).start()

    def _build(self, space: SpaceStandIn, commit: str) -> None:
        time.sleep(self.lag)
        space.stage = "BUILDING"
        time.sleep(self.building)  # so that somebody sees it building
        try:
            stage = self.build(space)
            space.built, space.stage = commit, stage
        except Exception as error:  # noqa: BLE001  # as on the Hub, a build that fails is the Space's stage
            space.log, space.stage = str(error), "BUILD_ERROR"


def _id(body: dict[str, Any]) -> str:
    return f"{body.get('organization') or 'tester'}/{body['name']}"


def _regular(space: SpaceStandIn, file: dict[str, Any]) -> dict[str, Any]:
    known = space.files.get(file["path"])
    return {
        "path": file["path"],
        "uploadMode": "regular",
        "shouldIgnore": False,
        "oid": _git_oid(known) if known is not None else None,
    }


def _git_oid(data: bytes) -> str:
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()
