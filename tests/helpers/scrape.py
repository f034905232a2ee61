"""What a Prometheus would have read from a server, by the client library's own parser."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from helpers.server import VllmServer

Labels = tuple[tuple[str, str], ...]


def parse(text: str) -> dict[tuple[str, Labels], float]:
    """(sample name, its labels in order of their names) -> value; AssertionError if a sample comes twice."""
    found: dict[tuple[str, Labels], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = sample.name, tuple(sorted(sample.labels.items()))
            assert key not in found, f"twice: {key}"
            found[key] = sample.value
    return found


def scrape(server: VllmServer) -> dict[str, float]:
    """Our samples of a server's only engine, by name and our own labels: ``delta_sync_state{state="live"}``."""
    found = {}
    for (name, labels), value in parse(server.get_bytes("/metrics")[0].decode()).items():
        if name.startswith("delta_sync_"):
            named = dict(labels)
            assert (named.pop("model_name"), named.pop("engine")) == ("tiny", "0")
            found[name + ("{" + ",".join(f'{k}="{v}"' for k, v in named.items()) + "}" if named else "")] = value
    return found
