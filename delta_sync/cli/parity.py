"""``delta-sync parity``: how far the trainer's log-probabilities and a server's are apart, on the same tokens."""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import typer

from delta_sync.checkpoint import Checkpoint, is_checkpoint
from delta_sync.cli.materialize import write_version
from delta_sync.cli.report import FINE, PROBLEM, AsJson, Report, Table, finish
from delta_sync.cli.run import PublicKey, checked_uri, local_path, open_ledger, split_version, version_of
from delta_sync.cli.server import Answer, ask, checked_servers
from delta_sync.errors import DeltaSyncError, FormatError, StoreError
from delta_sync.mismatch import Mismatch, mismatch

API_KEY = "VLLM_API_KEY"
Precision = Literal["auto", "float32", "bfloat16", "float16", "autocast"]
PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "Water boils at a lower temperature on a mountain because",
    "Q: What is 17 + 25?\nA:",
    "The three most important rules of good writing are",
    "Dear Sir or Madam,\n\nI am writing to",
    "1, 1, 2, 3, 5, 8,",
)
PLAIN = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "ignore_eos": True}
NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def parity(
    what: Annotated[str, typer.Argument(metavar="CKPT|URI[@VERSION]", help="What the trainer has; as in the run.")],
    server: Annotated[str, typer.Option("--server", metavar="URL", help="The server, as http://HOST:PORT.")],
    dtype: Annotated[
        Precision, typer.Option(help="What the trainer computes in; autocast: float32 weights, bf16=True.")
    ] = "auto",
    device: Annotated[str, typer.Option(help="Where the trainer's side is computed.")] = "cpu",
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", metavar="TEXT", help="Several times for more.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", exists=True, dir_okay=False, help="One prompt a line.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens that the server samples after each prompt.")] = 64,
    seed: Annotated[int, typer.Option(help="Of the server's sampling.")] = 0,
    fail_above: Annotated[float | None, typer.Option(metavar="K3", help="Exit with 1 if the mean is above.")] = None,
    timeout: Annotated[float, typer.Option(min=1, max=3600, help="Seconds for each request.")] = 300.0,
    public_key: PublicKey = None,
    as_json: AsJson = False,
) -> None:
    """Have the server sample tokens, score the same tokens with transformers, and say how far the two are apart.

    Of a run the version that is named, or that the server serves; the server must serve that one, so that what is
    left is kernels and precision, not staleness. Needs torch and transformers: the extra trl. VLLM_API_KEY is the key.
    """
    scoring = _scoring()
    [url] = checked_servers([server])
    if not _is_checkpoint(what):
        checked_uri(split_version(what)[0])
    how = _How(url, os.environ.get(API_KEY) or None, dtype, device, tokens, seed, timeout)
    finish(as_json, lambda: _report(what, how, _prompts(prompt or (), prompts), public_key, scoring, fail_above))


def _prompts(given: Sequence[str], file: Path | None) -> list[str]:
    """Those given, and the file's lines that hold any; the usual ones if there are none. FormatError."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines() if file else []
    except UnicodeDecodeError as error:
        raise FormatError(f"{file}", expected="UTF-8 text", got=str(error), remedy="one prompt a line") from None
    return [*given, *(line for line in lines if line.strip())] or list(PROMPTS)


@dataclass(frozen=True)
class _How:
    url: str
    key: str | None
    dtype: str
    device: str
    tokens: int
    seed: int
    timeout: float


def _scoring() -> Any:
    """The trainer's package, by its name: nothing here imports torch."""
    try:
        return importlib.import_module("trl_callback.scoring")
    except ModuleNotFoundError as error:
        needs = f"parity needs {error.name}: pip install 'delta-weight-sync[trl]'"
        raise typer.BadParameter(needs, param_hint="parity") from None


def _report(
    what: str, how: _How, prompts: Sequence[str], keys: list[str] | None, scoring: Any, fail_above: float | None
) -> Report:
    status = _got(ask("GET", how.url, "/delta_sync/status", how.key, how.timeout), how.url)
    with _checkpoint(what, status, keys) as (folder, version):
        sampled = _sample(how, prompts, version)
        trained = _dtype_of(folder)
        precision = NAMES.get(trained, "float32") if how.dtype == "auto" else how.dtype
        scored = _scored(scoring, folder, sampled, precision, how.device)
    found = mismatch(
        np.concatenate([s.logprobs for s in scored]),
        np.concatenate([s.logprobs for s in sampled]),
        np.concatenate([ours.top1 == theirs.top1 for ours, theirs in zip(scored, sampled, strict=True)]),
    )
    if found is None:
        raise FormatError(f"log-probabilities of {how.url}", expected="numbers", got="none that is finite")
    served = NAMES.get(str(status.get("serving_dtype")), str(status.get("serving_dtype")))
    document: dict[str, object] = {
        "what": what,
        "server": how.url,
        "version": version,
        "served_versions": sorted({v for s in sampled for v in s.versions}),
        "prompts": len(prompts),
        "trainer_dtype": precision,
        "serving_dtype": served,
        **found.to_dict(),
    }
    failed = fail_above is not None and found.k3_mean > fail_above
    return Report(document, _parts(document, found), PROBLEM if failed else FINE, _doubts(document, failed, fail_above))


def _scored(scoring: Any, folder: Path, sampled: Sequence[_Sampled], precision: str, device: str) -> Any:
    try:
        return scoring.score(folder, [(s.prompt, s.tokens) for s in sampled], precision, device)
    except (RuntimeError, AssertionError, ValueError, ImportError) as error:  # torch's and transformers' own
        remedy = "look at --device and --dtype, and at whether transformers knows the model"
        raise FormatError(
            f"model on {device}", expected="one that transformers can compute with", got=error, remedy=remedy
        ) from error


def _parts(document: dict[str, Any], found: Mismatch) -> list[Table | str]:
    sides = f"trainer computes in {document['trainer_dtype']}, server serves {document['serving_dtype']}"
    versions = ", ".join(map(str, document["served_versions"])) or "unknown"
    rows = [
        ["tokens", f"{found.tokens:,}"],
        ["k3 KL, mean", f"{found.k3_mean:.3e}"],
        ["k3 KL, max", f"{found.k3_max:.3e}"],
        ["log-probability apart, mean", f"{found.difference_mean:.3e}"],
        ["log-probability apart, max", f"{found.difference_max:.3e}"],
        ["same most probable token", "-" if found.top1 is None else f"{100 * found.top1:.2f}%"],
    ]
    head = f"{document['what']} and {document['server']}, which served version {versions}: {sides}"
    return [head, Table("trainer beside server, nats", ("", ">found"), rows)]


def _doubts(document: dict[str, Any], failed: bool, fail_above: float | None) -> list[str]:
    doubts = [f"k3 mean is above {fail_above:g}"] if failed else []
    computes = "bfloat16" if document["trainer_dtype"] == "autocast" else document["trainer_dtype"]
    if computes != document["serving_dtype"]:
        doubts.append(
            f"the trainer computes in {computes} and the server in {document['serving_dtype']}: "
            "they drift apart even when every sync is exact"
        )
    if document["version"] is None:
        doubts.append("a checkpoint has no version: whether the server serves these weights is not known")
    return doubts


def _is_checkpoint(what: str) -> bool:
    """A run may be a local folder too, but has no weights at its top."""
    path = local_path(what)
    return path is not None and is_checkpoint(path)


@contextmanager
def _checkpoint(what: str, status: dict[str, Any], keys: list[str] | None) -> Iterator[tuple[Path, int | None]]:
    """A folder for from_pretrained, and which version that is."""
    if _is_checkpoint(what):
        yield Path(what), None
        return
    uri, version = split_version(what)
    version = status.get("version") if version is None else version
    if version is None:
        raise DeltaSyncError("the server", expected="a version of a run served", got=str(status.get("state")))
    ledger = open_ledger(uri, keys)
    with tempfile.TemporaryDirectory(prefix="delta-sync-parity-") as scratch:
        folder = Path(scratch) / "checkpoint"
        manifest = version_of(ledger, version)
        if manifest.kind == "adapter":  # the server answers with it, transformers would without
            remedy = "compare with a folder that has it merged: delta-sync materialize, then PEFT's merge_and_unload"
            raise FormatError(f"version {version}", expected="weights", got="a LoRA adapter", remedy=remedy)
        names = write_version(ledger, manifest, folder)[1]
        if "config.json" not in names:
            remedy = "name a checkpoint's folder instead"
            raise FormatError(f"anchor of {uri}", expected="a config.json", got="none", remedy=remedy)
        yield folder, version


def _dtype_of(folder: Path) -> str:
    """The element type of most of a checkpoint's elements."""
    sizes: dict[str, int] = {}
    for _, kind, _, bits in Checkpoint(folder):
        sizes[kind.name] = sizes.get(kind.name, 0) + bits.size
    return max(sizes, key=lambda name: sizes[name])


@dataclass(frozen=True)
class _Sampled:
    """One completion as the server made it: log-probabilities, float64 ``[n]``, NaN where it gave none."""

    prompt: list[int]
    tokens: list[int]
    logprobs: Any
    top1: Any  # int64 ``[n]``
    versions: tuple[int, ...]


def _sample(how: _How, prompts: Sequence[str], version: int | None) -> list[_Sampled]:
    models = _got(ask("GET", how.url, "/v1/models", how.key, how.timeout), how.url)
    wish = {} if version is None else {"x-delta-sync-version": str(version)}
    sampled = []
    try:
        name = models["data"][0]["id"]
        for number, text in enumerate(prompts):
            body = {
                "model": name, "prompt": text, "max_tokens": how.tokens, "seed": how.seed + number, "logprobs": 1,
                "return_token_ids": True, "return_tokens_as_token_ids": True, **PLAIN,
            }  # fmt: skip
            answer = ask("POST", how.url, "/v1/completions", how.key, how.timeout, body, **wish)
            sampled.append(_read(_got(answer, how.url)))
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(
            f"completions of {how.url}", expected="token ids and log-probabilities", got=repr(error)[:200],
            remedy="use a vLLM whose /v1/completions knows return_token_ids",
        ) from None  # fmt: skip
    return sampled


def _read(answer: dict[str, Any]) -> _Sampled:
    [choice] = answer["choices"]
    found = choice["logprobs"]
    tops = [max(top, key=lambda name: _number(top[name])) for top in found["top_logprobs"]]
    ids = np.array([int(name.removeprefix("token_id:")) for name in tops])
    spans = (answer.get("usage") or {}).get("delta_sync", {}).get("versions", ())
    versions = tuple(version for version in spans if version is not None)  # None: of no proven version
    logprobs = np.array([_number(value) for value in found["token_logprobs"]])
    sampled = _Sampled(list(choice["prompt_token_ids"]), list(choice["token_ids"]), logprobs, ids, versions)
    if not (len(sampled.tokens) == logprobs.size == ids.size and sampled.prompt):
        raise ValueError(f"{len(sampled.tokens)} tokens with {logprobs.size} log-probabilities")
    return sampled


def _number(value: float | None) -> float:
    return float("nan") if value is None else float(value)


def _got(answer: Answer, url: str) -> dict[str, Any]:
    if answer.error is None:
        return answer.body
    kind = StoreError if answer.unreachable else DeltaSyncError
    raise kind(f"server {url}", expected="an answer", got=answer.error)
