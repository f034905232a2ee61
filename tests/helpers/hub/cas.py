"""The Xet content-addressed storage: takes xorbs and shards, answers how a file is put together."""

from __future__ import annotations

import re
import threading
import time
import uuid
from dataclasses import dataclass, field

from helpers.hub.wire import Answer, Request, as_json
from helpers.hub.xet_format import Chunk, Term, chunks_of, files_of


@dataclass
class Cas:
    """What is stored, and which access tokens are good until when."""

    token_seconds: float = 3600.0
    xorbs: dict[str, bytes] = field(default_factory=dict)
    chunks: dict[str, list[Chunk]] = field(default_factory=dict)
    files: dict[str, list[Term]] = field(default_factory=dict)
    tokens: dict[str, tuple[float, str]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def new_token(self, kind: str) -> tuple[str, int]:
        token, until = f"xet_{kind}_{uuid.uuid4().hex}", time.time() + self.token_seconds
        self.tokens[token] = until, kind
        return token, int(until)

    def expire_tokens(self) -> None:
        """From now on every token handed out so far is refused, whatever it said of itself."""
        self.tokens.clear()

    def size(self, file: str) -> int:
        return sum(term.size for term in self.files[file])

    def answer(self, request: Request) -> Answer:
        path = request.path
        if request.method in ("GET", "HEAD") and (found := re.fullmatch(r"/cas/xorbs/(\w+)", path)):
            return self._bytes(found[1], request)
        if not self._allowed(request):
            return Answer(401, b"token expired or unknown")
        if found := re.fullmatch(r"/cas/v1/xorbs/default/(\w+)", path):
            return self._take_xorb(found[1], request.body)
        if path in ("/cas/v1/shards", "/cas/v2/shards"):
            return self._take_shard(request)
        if found := re.fullmatch(r"/cas/v1/reconstructions/(\w+)", path):
            return self._reconstruction(found[1], request)
        return Answer(404)  # global deduplication, upload grants, newer versions: the client goes on without

    def _allowed(self, request: Request) -> bool:
        until, kind = self.tokens.get(request.headers.get("authorization", "").removeprefix("Bearer "), (0.0, ""))
        return time.time() < until and (request.method == "GET" or kind == "write")

    def _take_xorb(self, name: str, body: bytes) -> Answer:
        chunks = chunks_of(body)
        with self._lock:
            new = name not in self.xorbs
            self.xorbs[name], self.chunks[name] = body, chunks
        return as_json({"was_inserted": new})

    def _take_shard(self, request: Request) -> Answer:
        described = list(files_of(request.body))
        with self._lock:
            for _, terms in described:
                for term in terms:
                    if term.last > len(self.chunks.get(term.xorb, ())):
                        return Answer(400, f"xorb {term.xorb} is not stored".encode())
            self.files.update(described)
        if "/v2/" in request.path:
            return Answer(200, b'{"type":"result"}\n', {"Content-Type": "application/x-ndjson"})
        return as_json({"result": 1})

    def _reconstruction(self, file: str, request: Request) -> Answer:
        """The terms that cover the asked range, with the byte ranges of the xorbs that hold them."""
        if file not in self.files:
            return Answer(404)
        start, end = byte_range(request, self.size(file))
        if start >= self.size(file):
            return Answer(416)
        terms, skipped, at = [], 0, 0
        wanted: dict[str, list[tuple[int, int]]] = {}
        for term in self.files[file]:
            inside = [0, 0, 0]  # first chunk, last chunk, bytes
            for number in range(term.first, term.last):
                size = self.chunks[term.xorb][number].size
                if at + size > start and at < end:
                    if not terms and not inside[2]:
                        skipped = max(0, start - at)
                    inside = [inside[0] if inside[2] else number, number + 1, inside[2] + size]
                at += size
            if inside[2]:
                chunks = {"start": inside[0], "end": inside[1]}
                terms.append({"hash": term.xorb, "unpacked_length": inside[2], "range": chunks})
                wanted.setdefault(term.xorb, []).append((inside[0], inside[1]))
        fetch = {
            xorb: [self._fetch(xorb, first, last, request.base) for first, last in _merged(spans)]
            for xorb, spans in wanted.items()
        }
        return as_json({"offset_into_first_range": skipped, "terms": terms, "fetch_info": fetch})

    def _fetch(self, xorb: str, first: int, last: int, base: str) -> dict[str, object]:
        stored = self.chunks[xorb]
        place = {"start": stored[first].start, "end": stored[last - 1].end - 1}
        return {"range": {"start": first, "end": last}, "url": f"{base}/cas/xorbs/{xorb}", "url_range": place}

    def _bytes(self, xorb: str, request: Request) -> Answer:
        data = self.xorbs[xorb]
        start, end = byte_range(request, len(data))
        return Answer(206, data[start:end], {"Content-Range": f"bytes {start}-{end - 1}/{len(data)}"})


def _merged(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same chunks without overlaps: the client takes the first span that a term begins in."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(spans):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(last, found[-1][1])
        else:
            found.append((first, last))
    return found


def byte_range(request: Request, size: int) -> tuple[int, int]:
    found = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("range", ""))
    if not found:
        return 0, size
    return int(found[1]), min(size, int(found[2]) + 1 if found[2] else size)
