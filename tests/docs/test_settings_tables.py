"""The pages that explain settings and the status leave none out, and name the defaults that are."""

from __future__ import annotations

import argparse
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from blocks import ROOT

from trl_callback.config import DeltaSyncConfig
from vllm_delta_plugin.config import ReplicaConfig
from vllm_delta_plugin.flag import _FLAGS, add_arguments
from vllm_delta_plugin.status import Facts, Status

TRAINER = ROOT / "docs" / "TRAINER.md"
SERVING = ROOT / "docs" / "SERVING.md"
NOT_SET_BY_USERS = {"fault"}  # of a replica: for tests
IN_WORDS = {"all", "made up", "the server's", "the run's", "on a terminal", "host name and a random suffix",
            "a share of what is free"}  # fmt: skip


def settings(page: Path) -> dict[str, str]:
    """Each setting of the page's table and what its second column says of it."""
    found: dict[str, str] = {}
    section = page.read_text().split("\n## Settings\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`[a-z_]+`(?:, `[a-z_]+`)*) \| ([^|]+) \| ", section, re.M)
    for names, defaults in rows:
        said = defaults.split(", ") if "," in defaults else [defaults] * (names.count(",") + 1)
        found.update(zip(re.findall(r"`(\w+)`", names), said, strict=True))
    return found


def same(said: str, default: Any) -> bool:
    """Whether the page means this default."""
    said = said.strip("`")
    if default is None:
        return said in IN_WORDS or said.isupper() or said.startswith("vllm_server_")
    for unit, factor in ((" MiB", 1024**2), (" s", 1)):
        if said.endswith(unit):
            return float(said.removesuffix(unit)) * factor == default
    if isinstance(default, bool):
        return said == str(default).lower()
    return said == default if isinstance(default, str) else float(said) == default


@pytest.mark.parametrize(
    ("page", "config", "elsewhere"),
    [
        (TRAINER, DeltaSyncConfig, {"uri"}),
        (SERVING, ReplicaConfig, {*_FLAGS.values(), *NOT_SET_BY_USERS}),
    ],
    ids=["trainer", "server"],
)
def test_each_setting_is_explained_with_its_default(page, config, elsewhere):
    explained = settings(page)
    assert set(explained) == {field.name for field in fields(config)} - elsewhere
    wrong = {f.name: explained[f.name] for f in fields(config) if f.name in explained
             and not same(explained[f.name], f.default)}  # fmt: skip
    assert not wrong


def test_each_flag_of_the_server_is_explained():
    parser = argparse.ArgumentParser(add_help=False)
    add_arguments(parser)
    text = SERVING.read_text()
    explained = re.findall(r"^\| `(--delta-sync[a-z-]*) ", text, re.M)
    assert sorted(explained) == sorted(action.option_strings[0] for action in parser._actions)
    named = re.search(r"are settings too \(([^)]+)\)", text)
    assert named and re.findall(r"`(\w+)`", named[1]) == list(_FLAGS.values())


def test_each_field_of_the_status_is_explained():
    facts = Facts("name", "/mnt/run", "model", "BF16", "processed_logprobs", "fingerprint")
    shown = {*Status(facts).to_dict(), "draining", "group"}  # see DeltaSync.status
    section = SERVING.read_text().split("\n## Status\n")[1].split("\n## ")[0]
    cells = re.findall(r"^\| (`[a-z_]+`(?:, `[a-z_]+`)*) \|", section, re.M)
    explained = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(explained) == sorted(shown)
