"""``hf://buckets/org/name[/folder]``, read without importing anything of the Hub's."""

from __future__ import annotations

import re
from dataclasses import dataclass

from delta_sync.errors import FormatError
from delta_sync.store.keys import check_key

EXPECTED = "hf://buckets/ORG/NAME or hf://buckets/ORG/NAME/FOLDER"
_REST = re.compile(r"buckets/([A-Za-z0-9][\w.-]*)/([A-Za-z0-9_][\w.-]*)(?:/(.*?))?/?")


@dataclass(frozen=True)
class HubPlace:
    """A folder of a bucket; ``folder`` is empty for the whole bucket."""

    bucket: str
    folder: str

    @property
    def uri(self) -> str:
        """The same as text."""
        return f"hf://buckets/{self.bucket}" + (f"/{self.folder}" if self.folder else "")


def parse_hub_place(rest: str) -> HubPlace | None:
    """What follows ``hf://``, or None if it names no bucket."""
    found = _REST.fullmatch(rest)
    if found is None:
        return None
    folder = found[3] or ""
    try:
        return HubPlace(f"{found[1]}/{found[2]}", check_key(folder) if folder else "")
    except FormatError:
        return None
