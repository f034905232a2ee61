"""Every Prometheus metric of a replica, in one table, made from what each engine answers to ``delta_sync_metrics``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from vllm_delta_plugin.measures import known

Answer = Mapping[str, Any]  # one engine's
Samples = Mapping[tuple[str, ...], Any]  # values of a metric's own labels -> number, or a histogram as in measures.py
ENGINE = ("model_name", "engine")  # labels of every metric, as in vLLM's own
UP = "delta_sync_engine_up"
STATES = ("waiting", "live", "refused", "poisoned")


@dataclass(frozen=True)
class Exported:
    """One metric: its name, kind, help, labels beside ENGINE, and how it is read from an engine's answer."""

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    help: str
    read: Callable[[Answer], Samples]
    labels: tuple[str, ...] = ()


def _one(name: str, missing: float | None = None) -> Callable[[Answer], Samples]:
    """A number of the status; no sample while it is null, unless ``missing`` stands for that."""

    def read(answer: Answer) -> Samples:
        value = missing if answer[name] is None else float(answer[name])
        return {} if value is None else {(): value}

    return read


def _measured(name: str) -> Callable[[Answer], Samples]:
    return lambda answer: {(): answer["measures"][name]}


def _each(name: str) -> Callable[[Answer], Samples]:
    return lambda answer: {(key,): value for key, value in answer["measures"][name].items()}


def _histogram(name: str) -> Callable[[Answer], Samples]:
    return lambda answer: {(): answer["measures"]["histograms"][name]}


def _is_up(answer: Answer) -> bool:
    return bool(answer.get("up", True))


def _refused(answer: Answer) -> Samples:
    refusal = answer["refusal"]
    return {("",): 0.0} if refusal is None else {(known(refusal["kind"]),): float(refusal["version"])}


METRICS = (
    Exported(
        "delta_sync_info",
        "gauge",
        "Always 1; the labels say who this is.",
        lambda answer: {(answer["replica"], answer["run"] or "", answer["plugin"], answer["transition"]): 1.0},
        ("replica", "run", "plugin_version", "transition"),
    ),
    Exported(
        UP,
        "gauge",
        "1 while the engine answers, 0 once it is dead or silent for 60 s; all its other series are gone then.",
        lambda answer: {(): float(_is_up(answer))},
    ),
    Exported("delta_sync_served_version", "gauge", "Version that is served, 0 before the first.", _one("version", 0.0)),
    Exported("delta_sync_newest_version", "gauge", "Newest version in the store.", _one("newest_version", 0.0)),
    Exported("delta_sync_lag_versions", "gauge", "Versions that the store is ahead.", _one("lag")),
    Exported(
        "delta_sync_lag_seconds",
        "gauge",
        "Age of the oldest version that was seen and is not served, by its trainer's clock.",
        _one("lag_seconds"),
    ),
    Exported(
        "delta_sync_state",
        "gauge",
        "1 for the state that the replica is in, 0 for the others.",
        lambda answer: {(state,): float(answer["state"] == state) for state in STATES},
        ("state",),
    ),
    Exported(
        "delta_sync_refused_version",
        "gauge",
        "Version that is not taken, 0 while all are; the label is the error's class.",
        _refused,
        ("kind",),
    ),
    Exported("delta_sync_ready", "gauge", "1 while /delta_sync/ready says 200.", _one("ready")),
    Exported(
        "delta_sync_pinned",
        "gauge",
        "1 while an operator holds the replica at a version.",
        lambda answer: {(): float(answer["pinned"] is not None)},
    ),
    Exported(
        "delta_sync_last_look_timestamp_seconds",
        "gauge",
        "Unix time of the last look at the store that got an answer.",
        _one("looked_at"),
    ),
    Exported("delta_sync_commits_total", "counter", "Versions made live.", _one("commits")),
    Exported("delta_sync_anchors_total", "counter", "Of these, those from complete weights.", _one("anchors_taken")),
    Exported("delta_sync_failures_total", "counter", "Failures by the error's class.", _each("failures"), ("kind",)),
    Exported(
        "delta_sync_digest_mismatches_total",
        "counter",
        "Hashes or digests, of objects or of live memory, that were not what a manifest says.",
        lambda answer: {(): answer["measures"]["failures"]["IntegrityError"]},
    ),
    Exported("delta_sync_audits_total", "counter", "Scans of all live memory.", _each("audits"), ("result",)),
    Exported(
        "delta_sync_changed_elements_total", "counter", "Elements changed by commits.", _measured("changed_elements")
    ),
    Exported(
        "delta_sync_fetched_bytes_total",
        "counter",
        "Bytes of objects that all ranks read, from the store or --delta-sync-cache, for versions made live.",
        _measured("fetched_bytes"),
    ),
    Exported(
        "delta_sync_noticed_seconds",
        "histogram",
        "From a version's creation, by its trainer's clock, until the replica saw it.",
        _histogram("noticed_seconds"),
    ),
    Exported(
        "delta_sync_stage_seconds",
        "histogram",
        "Fetching, decoding and proving a version beside serving.",
        _histogram("stage_seconds"),
    ),
    Exported(
        "delta_sync_commit_seconds",
        "histogram",
        "The engine's thread held by a commit, or paused by a load in place.",
        _histogram("commit_seconds"),
    ),
    Exported(
        "delta_sync_served_seconds",
        "histogram",
        "From a version's creation, by its trainer's clock, until it was served.",
        _histogram("served_seconds"),
    ),
    Exported(
        "delta_sync_gap_seconds",
        "histogram",
        "Longest time between two outputs of the engine around a commit; nothing while it is idle.",
        _histogram("gap_seconds"),
    ),
)


def exposition(answers: Sequence[Answer | None]) -> bytes:
    """The metrics of all engines in Prometheus' text format.

    ``answers``: in engine order, None for one that says nothing; {"model", "up": False} for one that is gone.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Answers({index: answer for index, answer in enumerate(answers) if answer is not None}))
    return generate_latest(registry)


class _Answers:
    """What prometheus_client calls a collector."""

    def __init__(self, answers: Mapping[int, Answer]) -> None:
        self._answers = answers

    def collect(self) -> Iterator[Metric]:
        """Every metric."""
        return (_family(metric, self._answers) for metric in METRICS)


def _family(metric: Exported, answers: Mapping[int, Answer]) -> Metric:
    labels = [*ENGINE, *metric.labels]
    kinds = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily, "histogram": HistogramMetricFamily}
    family: Any = kinds[metric.kind](metric.name, metric.help, labels=labels)
    for engine, answer in answers.items():
        samples = metric.read(answer) if metric.name == UP or _is_up(answer) else {}
        for values, sample in samples.items():
            labelled = [str(answer["model"]), str(engine), *values]
            if metric.kind == "histogram":
                bounds = [*map(str, sample["bounds"]), "+Inf"]
                family.add_metric(labelled, list(zip(bounds, accumulate(sample["counts"]), strict=True)), sample["sum"])
            else:
                family.add_metric(labelled, sample)
    return family  # type: ignore[no-any-return]
