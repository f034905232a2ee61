"""Reads the few Dockerfile instructions that our images use; any other is an error."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from string import Template


@dataclass(frozen=True)
class Step:
    """A RUN or COPY, and the environment and folder that it finds."""

    word: str
    rest: str
    env: dict[str, str]
    workdir: str


@dataclass
class Dockerfile:
    """The steps in order, and what holds for the process that is started in the end."""

    base: str = ""
    steps: list[Step] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    user: str = "0"
    workdir: str = "/"
    ports: list[int] = field(default_factory=list)
    entrypoint: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> Dockerfile:
        """Parse a file; ValueError names an instruction that is not known here."""
        made, arguments = cls(), dict[str, str]()
        for line in _lines(path.read_text()):
            word, _, rest = line.partition(" ")
            made._take(word.upper(), rest.strip(), arguments)
        return made

    def _take(self, word: str, rest: str, arguments: dict[str, str]) -> None:
        if word == "ARG":
            name, _, default = rest.partition("=")
            arguments[name] = default
        elif word == "FROM":
            self.base = Template(rest).substitute(arguments)
        elif word in ("RUN", "COPY"):
            self.steps.append(Step(word, rest, dict(self.env), self.workdir))
        elif word == "ENV":
            self.env.update(pair.split("=", 1) for pair in shlex.split(rest))
        elif word == "USER":
            self.user = rest
        elif word == "WORKDIR":
            self.workdir = rest
        elif word == "EXPOSE":
            self.ports.append(int(rest))
        elif word in ("ENTRYPOINT", "CMD"):
            self.entrypoint = json.loads(rest) if word == "ENTRYPOINT" else self.entrypoint + json.loads(rest)
        else:
            raise ValueError(f"{word}: expected an instruction that tests/helpers/container knows, got {word} {rest}")


def _lines(text: str) -> list[str]:
    kept = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    return [line for line in re.sub(r"\\\n", " ", kept).splitlines() if line.strip()]
