"""Runs a bash or console block in a real bash; ``vllm`` and ``curl`` are recorded where no server is there for them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from blocks import ROOT

_RECORD = """#!{python}
import json, sys
with open({calls!r}, "a") as file:
    file.write(json.dumps(["{name}", *sys.argv[1:]]) + "\\n")
"""
_PASS_ON = '#!/bin/sh\nexec {python} {arguments} "$@"\n'
_DIFFERS = re.compile(r"[\d/…'\"]|\.\.\.")  # a shown line with any of these differs from run to run


@dataclass(frozen=True)
class Command:
    """A ``$ command`` of a console block, and what is shown below it."""

    text: str
    shown: list[str]


@dataclass(frozen=True)
class Outcome:
    """What bash said: each command's exit code and output, and the recorded calls."""

    codes: list[int]
    outputs: list[str]
    calls: list[list[str]]


def commands_of(code: str) -> list[Command]:
    """The commands of a console block; lines that go on after a backslash belong to theirs."""
    found: list[Command] = []
    going_on = False
    for line in code.splitlines():
        if line.startswith("$ "):
            found.append(Command(line[2:], []))
        elif going_on:
            found[-1] = Command(f"{found[-1].text}\n{line}", [])
        else:
            assert found, f"a console block begins with `$ command`, not with {line!r}"
            found[-1].shown.append(line)
        going_on = line.endswith("\\") and not found[-1].shown
    return found


def run(commands: list[Command], folder: Path, env: Mapping[str, str], *, recorded: tuple[str, ...]) -> Outcome:
    """All commands in one bash, so that ``export`` and ``$?`` work; the programs in ``recorded`` are only noted."""
    calls = folder / "calls"
    programs = _programs(folder / "bin", calls, recorded)
    script = ["code=0"]
    for command in commands:
        script += ["printf '\\036'", "(exit $code)", command.text, "code=$?", "printf '\\037%d' $code"]
    done = subprocess.run(
        ["bash", "-c", "\n".join(script)],
        cwd=folder,
        env=environment({**env, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=240,
    )
    parts = [part.partition("\037") for part in done.stdout.split("\036")[1:]]
    said = [json.loads(line) for line in calls.read_text().splitlines()] if calls.exists() else []
    return Outcome([int(code or -1) for _, _, code in parts], [output for output, _, _ in parts], said)


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """This process's, with ``env``, and this repository before an installed one."""
    return {**os.environ, **env, "PYTHONPATH": str(ROOT)}


def check(commands: list[Command], outcome: Outcome) -> None:
    """Exit codes as ``$ echo $?`` shows them; of shown lines those that never change must be printed, and JSON's keys.

    A command whose output is shown may find a problem (1), as that is then to be seen; otherwise it must end with 0.
    """
    assert len(outcome.codes) == len(commands), outcome
    for k, (command, code, output) in enumerate(zip(commands, outcome.codes, outcome.outputs, strict=True)):
        told = f"$ {command.text}\n{output}\n(exit code {code})"
        if command.text == "echo $?":
            assert output.strip() == "".join(command.shown).strip(), told
        asked = k + 1 < len(commands) and commands[k + 1].text == "echo $?"
        assert asked or code == 0 or (code == 1 and command.shown), told
        printed = {" ".join(line.split()) for line in output.splitlines()}
        keys = set(re.findall(r'"(\w+)":', "".join(command.shown)))
        assert all(f'"{key}":' in output for key in keys), f"not all of {keys}\n{told}"
        for line in command.shown:
            wanted = " ".join(line.split())
            differs = _DIFFERS.search(wanted) and not wanted.startswith("HTTP/")
            assert not wanted or differs or wanted in printed, f"not printed: {wanted!r}\n{told}"


def _programs(folder: Path, calls: Path, recorded: tuple[str, ...]) -> Path:
    folder.mkdir()
    scripts = {name: _RECORD.format(python=sys.executable, calls=str(calls), name=name) for name in recorded}
    scripts["delta-sync"] = _PASS_ON.format(python=sys.executable, arguments="-m delta_sync.cli")
    scripts["python"] = _PASS_ON.format(python=sys.executable, arguments="")
    for name, text in scripts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder
