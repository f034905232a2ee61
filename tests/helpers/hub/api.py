"""The Hub's bucket API, as far as HfApi, HfFileSystem, the ``hf`` command and this project use it."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from urllib.parse import quote, unquote

from hf_xet import XetFileInfo, XetSession

from helpers.hub.buckets import Bucket, File
from helpers.hub.cas import Cas, byte_range
from helpers.hub.faults import Fault
from helpers.hub.spaces_stand_in import SpacesStandIn
from helpers.hub.wire import Answer, Request, as_json, refusal

_NO_BUCKET = refusal(404, "RepoNotFound", "Bucket not found")


class HubApi:
    """Buckets and who may do what: ``tokens`` maps a token to "read" or "write"."""

    def __init__(self, cas: Cas, tokens: dict[str, str], page: int) -> None:
        self.cas, self.tokens, self.page = cas, tokens, page
        self.buckets: dict[str, Bucket] = {}
        self.spaces = SpacesStandIn()
        self.closing = threading.Event()
        self.feeds_end = threading.Event()  # set to end every feed that is open
        self.serves_events = True

    def answer(self, request: Request, fault: Fault | None = None) -> Answer:
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        right = self.tokens.get(token, "")
        if token and not right:
            return refusal(401, "", "Invalid credentials in Authorization header")
        if request.path == "/api/whoami-v2":
            return as_json({"name": "tester", "type": "user", "orgs": []}) if right else refusal(401, "", "no token")
        if found := re.fullmatch(r"/buckets/([^/]+/[^/]+)/resolve/(.+)", request.path):
            return self._in_bucket(found[1], right, lambda bucket: self._resolve(bucket, unquote(found[2]), request))
        if found := re.fullmatch(r"/api/buckets/([^/]+)(?:/([^/]+)(?:/(.*))?)?", request.path):
            return self._bucket_call(*found.groups(), request, right, fault)
        return self.spaces.answer(request, right) or Answer(404)

    def _bucket_call(
        self, owner: str, name: str | None, rest: str | None, request: Request, right: str, fault: Fault | None
    ) -> Answer:
        if name is None:
            mine = [
                b.info() for b in self.buckets.values() if b.id.startswith(owner + "/") and (right or not b.private)
            ]
            return as_json(mine)
        bucket_id = f"{'tester' if owner == 'me' else owner}/{name}"
        changes = (request.method != "GET" and rest != "paths-info") or rest == "xet-write-token"
        if changes and right != "write":
            return refusal(403 if right else 401, "", "Your token may not write here")
        if request.method == "POST" and rest is None:
            return self._create(bucket_id, request)
        return self._in_bucket(bucket_id, right, lambda bucket: self._call(bucket, rest or "", request, fault))

    def _in_bucket(self, bucket_id: str, right: str, call: Callable[[Bucket], Answer]) -> Answer:
        bucket = self.buckets.get(bucket_id)
        if bucket is None or (bucket.private and not right):
            return _NO_BUCKET if right else refusal(401, "RepoNotFound", "Bucket not found")
        return call(bucket)

    def _create(self, bucket_id: str, request: Request) -> Answer:
        url = {"url": f"{request.base}/buckets/{bucket_id}"}
        if bucket_id in self.buckets:
            return as_json({**url, "error": "You already created this bucket"}, 409)
        self.buckets[bucket_id] = Bucket(bucket_id, private=request.json().get("visibility") == "private")
        return as_json(url)

    def _call(self, bucket: Bucket, rest: str, request: Request, fault: Fault | None) -> Answer:
        match request.method, rest.partition("/"):
            case "GET", ("", _, _):
                return as_json(bucket.info())
            case "DELETE", ("", _, _):
                del self.buckets[bucket.id]
                return Answer(204)
            case "GET", ("tree", _, folder):
                return self._tree(bucket, unquote(folder), request, fault)
            case "POST", ("paths-info", _, _):
                found = [bucket.files[path] for path in request.json()["paths"] if path in bucket.files]
                return as_json([file.row() for file in found])
            case "POST", ("batch", _, _):
                return self._batch(bucket, request, fault)
            case "GET", ("xet-read-token" | "xet-write-token" as kind, _, _):
                return self._xet_token(kind.split("-")[1], request)
            case "GET", ("events", _, _):
                return self._events(bucket, request)
        return Answer(404)

    def _tree(self, bucket: Bucket, folder: str, request: Request, fault: Fault | None) -> Answer:
        """One page: all files that start so, or without ``recursive`` the files and folders right in that folder."""
        at = time.time() - fault.seconds if fault and fault.kind == "stale" else None
        if request.query.get("recursive", "").lower() == "true":
            rows = [file.row() for file in bucket.under(folder, at)]
        else:
            inside = folder.rstrip("/") + "/" if folder else ""
            rows = _one_level(bucket.under(inside, at), len(inside))
        start = int(request.query.get("cursor", "0"))
        answer = as_json(rows[start : start + self.page])
        if start + self.page < len(rows):
            more = "".join(f"&{key}={quote(value)}" for key, value in request.query.items() if key != "cursor")
            answer.headers["Link"] = f'<{request.base}{request.path}?cursor={start + self.page}{more}>; rel="next"'
        return answer

    def _batch(self, bucket: Bucket, request: Request, fault: Fault | None) -> Answer:
        """Every operation by itself and in order; the answer says which failed."""
        refused = fault.text if fault and fault.kind == "fail some" else None
        failed, done = [], 0
        for operation in map(json.loads, request.body.splitlines()):
            path = operation["path"]
            if refused is not None and re.search(refused, path):
                failed.append({"path": path, "error": "Internal error"})
                continue
            if operation["type"] == "deleteFile":
                bucket.remove(path)  # a missing one is not an error here; what the Hub does is not known
            elif (xet_hash := operation["xetHash"]) in self.cas.files or set(xet_hash) == {"0"}:
                size = self.cas.size(xet_hash) if xet_hash in self.cas.files else 0
                bucket.put(path, size, xet_hash, operation.get("mtime", 0) / 1000)
            else:
                failed.append({"path": path, "error": "Xet file not found"})
                continue
            done += 1
        counts = {"success": not failed, "processed": done + len(failed), "succeeded": done, "failed": failed}
        return as_json(counts, 422 if failed and not done else 200)

    def _xet_token(self, kind: str, request: Request) -> Answer:
        token, until = self.cas.new_token(kind)
        url = f"{request.base}/cas"
        headers = {"X-Xet-Cas-Url": url, "X-Xet-Access-Token": token, "X-Xet-Token-Expiration": str(until)}
        answer = as_json({"casUrl": url, "exp": until, "accessToken": token})
        answer.headers.update(headers)
        return answer

    def _resolve(self, bucket: Bucket, path: str, request: Request) -> Answer:
        file = bucket.files.get(path)
        if file is None:
            return refusal(404, "EntryNotFound", "Entry not found")
        auth = f'<{request.base}/api/buckets/{bucket.id}/xet-read-token>; rel="xet-auth"'
        headers = {"X-Xet-Hash": file.xet_hash, "X-Linked-Size": str(file.size), "Link": auth}
        if request.method == "HEAD":
            return Answer(200, b"", {**headers, "Content-Length": str(file.size)})
        start, end = byte_range(request, file.size)
        return Answer(206 if "range" in request.headers else 200, self._content(file, request)[start:end], headers)

    def _content(self, file: File, request: Request) -> bytes:
        """A file's bytes, put together by hf_xet from this very server: what a browser or fsspec would be sent."""
        if not file.size:
            return b""
        token, until = self.cas.new_token("read")
        group = XetSession().new_download_stream_group(f"{request.base}/cas", token, until)
        return b"".join(group.download_stream(XetFileInfo(file.xet_hash, file.size)))

    def _events(self, bucket: Bucket, request: Request) -> Answer:
        if not self.serves_events:
            return Answer(404)
        cursor, since = request.query.get("cursor"), request.query.get("since")
        when = datetime.fromisoformat(since).timestamp() if since else None
        lines = bucket.events(int(cursor) if cursor else None, when, self.feeds_end)
        return Answer(200, headers={"Content-Type": "text/event-stream"}, stream=_encoded(lines))


def _encoded(lines: Iterator[str]) -> Iterator[bytes]:
    for line in lines:
        yield line.encode()


def _one_level(files: list[File], start: int) -> list[dict[str, object]]:
    rows: dict[str, dict[str, object]] = {}
    for file in files:
        name, slash, _ = file.path[start:].partition("/")
        path = file.path[:start] + name
        rows[path] = (
            {"type": "directory", "path": path, "uploadedAt": file.row()["uploadedAt"]} if slash else file.row()
        )
    return list(rows.values())
