"""``delta-sync ledger``: what is in a run, and who serves what."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from delta_sync.ack import Ack
from delta_sync.cli.report import FINE, PROBLEM, AsJson, Report, Table, age, finish, percent, size
from delta_sync.cli.run import DAMAGE, AckUri, Chain, PublicKey, checked_uri, open_ledger, read_chain
from delta_sync.ledger import AnchorRef, Ledger
from delta_sync.manifest import Manifest


def ledger(
    uri: Annotated[str, typer.Argument(metavar="URI", callback=checked_uri, help="The run's folder or bucket.")],
    last: Annotated[int | None, typer.Option(min=1, help="Only so many of the newest versions.")] = None,
    ack_uri: AckUri = None,
    public_key: PublicKey = None,
    as_json: AsJson = False,
) -> None:
    """Every version of a run, and every replica that acknowledged one.

    Exits with 1 if there is no version, a manifest or an anchor's record is damaged, or a replica refused a version.
    """
    finish(as_json, lambda: _report(open_ledger(uri, public_key, ack_uri), last))


def _report(run: Ledger, last: int | None) -> Report:
    now = time.time()
    chain = read_chain(run, last)
    anchored = set(run.anchors())
    versions = [_version(run, manifest, anchored, now) for manifest in chain.versions]
    replicas = [_replica(ack, chain, now) for ack in run.acknowledgements().values()]
    damaged = chain.start or chain.ends_in_damage or any("error" in (version["anchor"] or {}) for version in versions)
    troubled = any(replica["state"] != "live" for replica in replicas)
    newest = chain.versions[-1]
    head = f"run {newest.run} at {run.store.uri}: version {newest.version}, epoch {newest.epoch}"
    document = {
        "uri": run.store.uri,
        "run": newest.run,
        "newest": newest.version,
        "epoch": newest.epoch,
        "versions": versions,
        "damaged_newest": str(chain.start) if chain.start else None,
        "chain_end": str(chain.end) if chain.end else None,
        "replicas": replicas,
    }
    parts: list[Table | str] = [head, _versions_table(versions)]
    if chain.start:
        parts.append(f"a newer one is damaged: {chain.start}")
    if chain.end:
        parts.append(f"nothing older: {chain.end}")
    parts.append(_replicas_table(replicas) if replicas else "no replica acknowledged a version")
    return Report(document, parts, PROBLEM if damaged or troubled else FINE)


def _version(run: Ledger, manifest: Manifest, anchored: set[AnchorRef], now: float) -> dict[str, Any]:
    return {
        "version": manifest.version,
        "epoch": manifest.epoch,
        "writer": manifest.writer,
        "kind": manifest.kind,
        "steps": list(manifest.steps),
        "created_at": manifest.created_at,
        "age_seconds": now - manifest.created_at,
        "changed_elements": manifest.changed_elements,
        "total_elements": manifest.total_elements,
        "objects": len(manifest.objects),
        "bytes": sum(ref.size for ref in manifest.objects),
        "codec": manifest.codec,
        "manifest": manifest.sha256,
        "parent": manifest.parent,
        "signed_by": manifest.signature.key if manifest.signature else None,
        "anchor": _anchor(run, manifest) if AnchorRef(manifest.version, manifest.epoch) in anchored else None,
    }


def _anchor(run: Ledger, manifest: Manifest) -> dict[str, object] | None:
    try:
        record = run.anchor(manifest)
    except DAMAGE as error:
        return {"error": str(error)}
    if record is None:
        return None
    total = sum(ref.size for ref in record.objects)
    return {"files": len(record.objects), "bytes": total, "created_at": record.created_at}


def _replica(ack: Ack, chain: Chain, now: float) -> dict[str, Any]:
    newest = chain.versions[-1]
    return {
        "replica": ack.replica,
        "state": ack.state,
        "version": ack.version,
        "epoch": ack.epoch,
        "lag": None if ack.version is None else newest.version - ack.version,
        "on_chain": _on_chain(ack, chain),
        "age_seconds": now - ack.time,
        "refused_version": ack.refused_version,
        "refused_object": ack.refused_object,
        "error_kind": ack.error_kind,
        "error": ack.error,
    }


def _on_chain(ack: Ack, chain: Chain) -> bool | None:
    """Whether a replica serves one of these versions; None where it serves none, or one older than these."""
    if ack.version is None or ack.version < chain.versions[0].version:
        return None
    return any(manifest.sha256 == ack.manifest for manifest in chain.versions)


def _versions_table(versions: list[dict[str, Any]]) -> Table:
    columns = [">version", "kind", ">epoch", ">steps", ">age", ">changed", ">%", ">bytes", "parent", "anchor"]
    rows = [_version_row(version) for version in versions]
    if any(version["signed_by"] for version in versions):
        columns.append("signed by")
        rows = [[*row, version["signed_by"] or "-"] for row, version in zip(rows, versions, strict=True)]
    return Table("versions", columns, rows)


def _version_row(version: dict[str, Any]) -> list[object]:
    first, last = version["steps"]
    anchor = version["anchor"]
    return [
        version["version"],
        version["kind"],
        version["epoch"],
        first if first == last else f"{first}-{last}",
        age(version["age_seconds"]),
        f"{version['changed_elements']:,}",
        percent(version["changed_elements"], version["total_elements"]),
        size(version["bytes"]),
        (version["parent"] or "-")[:8],
        "-" if anchor is None else "damaged" if "error" in anchor else size(anchor["bytes"]),
    ]


def _replicas_table(replicas: list[dict[str, Any]]) -> Table:
    rows = [
        [
            replica["replica"],
            replica["state"],
            "-" if replica["version"] is None else replica["version"],
            "-" if replica["lag"] is None else replica["lag"],
            age(replica["age_seconds"]),
            _trouble(replica),
        ]
        for replica in replicas
    ]
    return Table("replicas", ("replica", "state", ">version", ">lag", ">heard", "error"), rows)


def _trouble(replica: dict[str, Any]) -> str:
    if replica["error"] is None and replica["on_chain"] is False:
        return "serves a version that is none of this chain's"
    if replica["error"] is None:
        return "-"
    refused = f"refused {replica['refused_version']}: " if replica["refused_version"] else ""
    return f"{refused}{replica['error']}"
