"""Listing a bucket, page by page."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

from delta_sync.errors import StoreError
from delta_sync.store.attempts import Deadline
from delta_sync.store.hub_client import HubClient
from delta_sync.store.hub_xet import XetFile

MAX_PAGES = 10_000


def list_files(client: HubClient, start: str, deadline: Deadline, doing: str) -> dict[str, XetFile]:
    """Every file whose path starts with ``start``, by path; one request for each page."""
    return {
        path: XetFile(row["xetHash"], row["size"]) for path, row in _list_rows(client, start, deadline, doing).items()
    }


def uploaded_at(client: HubClient, path: str, deadline: Deadline, doing: str) -> float | None:
    """When the Hub says that it took a file, in unix seconds; None if it has none or does not say."""
    row = _list_rows(client, path, deadline, doing).get(path, {})
    try:
        return datetime.fromisoformat(str(row.get("uploadedAt"))).timestamp()
    except ValueError:
        return None


def _list_rows(client: HubClient, start: str, deadline: Deadline, doing: str) -> dict[str, Any]:
    files: dict[str, Any] = {}
    url = f"{client.api}/tree{'/' + quote(start, safe='') if start else ''}?recursive=true"
    for _ in range(MAX_PAGES):
        response = client.call("GET", url, deadline, doing=doing, expected=(200, 404))
        if response.status_code == 404:
            if response.headers.get("x-error-code") == "EntryNotFound":
                return files
            raise client.refusal(response, doing)
        try:
            rows = [row for row in response.json() if row["type"] == "file" and row["path"].startswith(start)]
            for row in rows:
                files[row["path"]] = row | {"xetHash": str(row["xetHash"]), "size": int(row["size"])}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StoreError(doing, expected="a listing", got="something else", remedy="try again") from error
        following = response.links.get("next", {}).get("url")
        if following is None:
            return files
        following = urljoin(url, following)
        if urlsplit(following)[:2] != urlsplit(url)[:2]:
            raise StoreError(doing, expected="further pages at the same host", got=urlsplit(following).netloc)
        url = following
    raise StoreError(doing, expected=f"at most {MAX_PAGES} pages", got="more", remedy="use a folder of the bucket")
