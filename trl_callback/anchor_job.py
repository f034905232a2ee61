"""Complete weights of one version on their way to the bucket, a shard at a time."""

from __future__ import annotations

import contextlib
import math
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from delta_sync.anchor_files import INDEX, Head, index_bytes, shard_layout, write_shard
from delta_sync.errors import StoreError
from delta_sync.manifest import Manifest
from delta_sync.writer import Writer
from trl_callback.progress import byte_bar, counted
from trl_callback.snapshot import Snapshot

REMEMBERED = 0.25  # of the snapshot's size: old bits that may pile up before versions have to wait for the next shard


class AnchorJob:
    """Attaches the snapshot's bits of now to ``manifest``; versions may be committed between two calls of ``advance``.

    Two anchors of one run have the same files, tensors at the same places in them, so that what did not change is
    the same bytes to a store that deduplicates.
    """

    def __init__(
        self, writer: Writer, manifest: Manifest, snapshot: Snapshot, sidecars: Mapping[str, bytes],
        *, progress: bool | None,
    ) -> None:  # fmt: skip
        self.version, self.size, self.began = manifest.version, snapshot.total_bytes, time.monotonic()
        self._writer = writer
        layout = shard_layout(snapshot.heads)
        self._small = {**sidecars, **({INDEX: index_bytes(layout)} if len(layout) > 1 else {})}
        self._shards = list(layout.items())
        self._upload = writer.begin_anchor(manifest, [*self._small, *layout], snapshot.states)
        self._past = snapshot.remember()  # last: what failed to begin remembers nothing
        self._open = contextlib.ExitStack()
        self._advance_bar = self._open.enter_context(byte_bar("delta-sync anchor", self.size, shown=progress))

    @property
    def must_go_on(self) -> bool:
        """Whether so much changed since that the next shard has to come before the next version."""
        return self._past.nbytes > REMEMBERED * self.size

    def advance(self) -> bool:
        """Upload the next file; whether that made the anchor complete. After a StoreError it may be called again."""
        while self._small:
            name = next(iter(self._small))
            self._upload.put(name, self._small[name])
            del self._small[name]
        if self._shards:
            name, heads = self._shards[0]
            with self._shard(name, heads) as path:
                self._upload.put(name, path)
            for head in heads:
                self._past.release(head[0])
            del self._shards[0]
        if self._shards:
            return False
        self._writer.finish_anchor(self._upload)
        self._open.close()
        return True

    def abandon(self) -> None:
        """Give up, leaving nothing behind that could be mistaken for an anchor."""
        self._open.close()
        self._past.release_all()
        self._upload.abandon()

    @contextlib.contextmanager
    def _shard(self, name: str, heads: list[Head]) -> Iterator[Path]:
        """The shard's temporary file; only one exists at a time."""
        with contextlib.ExitStack() as stack:
            try:
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="delta-sync-anchor-"))
                self._write(Path(folder) / name, heads)
            except OSError as error:
                raise _no_room(error, heads) from error
            yield Path(folder) / name

    def _write(self, path: Path, heads: list[Head]) -> None:
        """Write one file."""
        write_shard(path, counted((self._past.tensor(head) for head in heads), self._advance_bar))


def _no_room(error: OSError, heads: list[Head]) -> StoreError:
    size = sum(kind.itemsize * math.prod(shape) for _, kind, shape in heads)
    return StoreError(
        "temporary file of an anchor",
        expected=f"{size} bytes in TMPDIR or the system's folder for temporary files",
        got=error.strerror,
        remedy="free disk space there, or set TMPDIR to a folder on a larger disk",
    )
