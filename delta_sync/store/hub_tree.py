"""Listing a bucket, page by page."""

from __future__ import annotations

from urllib.parse import quote, urljoin, urlsplit

from delta_sync.errors import StoreError
from delta_sync.store.attempts import Deadline
from delta_sync.store.hub_client import HubClient
from delta_sync.store.hub_xet import XetFile

MAX_PAGES = 10_000


def list_files(client: HubClient, start: str, deadline: Deadline, doing: str) -> dict[str, XetFile]:
    """Every file whose path starts with ``start``, by path; one request for each page."""
    files: dict[str, XetFile] = {}
    url = f"{client.api}/tree{'/' + quote(start, safe='') if start else ''}?recursive=true"
    for _ in range(MAX_PAGES):
        response = client.call("GET", url, deadline, doing=doing, expected=(200, 404))
        if response.status_code == 404:
            if response.headers.get("x-error-code") == "EntryNotFound":
                return files
            raise client.refusal(response, doing)
        try:
            rows = [row for row in response.json() if row["type"] == "file" and row["path"].startswith(start)]
            files.update({row["path"]: XetFile(str(row["xetHash"]), int(row["size"])) for row in rows})
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
