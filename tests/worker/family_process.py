"""Families served in a process of its own, where torchvision can be imported: the tests' own stays as users' are.

Run as ``python family_process.py``: reads jobs, ``[family, folder, options]`` a line, and prints each one's outcome,
or its error, as a line of JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from helpers import plain_torchvision

    plain_torchvision.install()  # before transformers is imported, which looks once

from family_case import Outcome, serve
from helpers.child import child
from helpers.families import FAMILIES, Family

Case = Callable[..., Outcome]


@contextmanager
def apart() -> Iterator[Case]:
    """``serve`` in one process for all; RuntimeError if vLLM raised one there."""
    command = [sys.executable, __file__]
    with child(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:

        def ask(family: Family, folder: Path, **options: Any) -> Outcome:
            process.stdin.write(json.dumps([family.name, str(folder), options]) + "\n")
            answers = (json.loads(line) for line in process.stdout if line.startswith(('{"cell"', '{"error"')))
            answer = next(answers, {"error": "the process ended", "vllms": False})  # within the test's own time
            if "error" in answer:
                raise (RuntimeError if answer["vllms"] else AssertionError)(answer["error"])
            return Outcome(**answer)

        yield ask


def main() -> None:
    for line in sys.stdin:
        name, folder, options = json.loads(line)
        try:
            answer = asdict(serve(FAMILIES[name], Path(folder), **options))
        except Exception as error:  # noqa: BLE001 - raised by who asked
            traceback.print_exc()
            answer = {"error": str(error), "vllms": isinstance(error, ValueError | RuntimeError | TypeError)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
