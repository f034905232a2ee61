"""torchvision for processes that serve models which see images, beside a CPU build of PyTorch.

PyPI's torchvision is linked against PyPI's torch, so its operators do not load there. ``import torchvision`` then fails
only where it describes two of them, and with it ``import transformers``: setup keeps it out of everybody's way, in a
folder of the environment. What vLLM takes of it, the resizing of images, is Python and torch.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

FOLDER = Path(sys.prefix) / "torchvision-without-operators"  # as scripts/setup_env.py makes it
_DESCRIBED = ("nms", "qnms")


def install() -> None:
    """Let this process import it, before transformers looks; nothing where setup left a whole one to import."""
    if not FOLDER.is_dir() or str(FOLDER) in sys.path:
        return
    for operator in _DESCRIBED:
        torch.library.define(f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    sys.path.append(str(FOLDER))


def environment(folder: Path) -> dict[str, str]:
    """The environment in which every Python process begins with ``install``; a file for it is written to ``folder``."""
    tests = Path(__file__).parents[1]
    lines = ("import sys", f"sys.path.append({str(tests)!r})", "from helpers import plain_torchvision")
    folder.mkdir()
    (folder / "sitecustomize.py").write_text("\n".join((*lines, "plain_torchvision.install()", "")))
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))}
