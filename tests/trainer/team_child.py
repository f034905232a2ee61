"""One rank of a TeamSession without a trainer: argv is JSON with folder, settings, and names of modules to set anew."""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module

import slow_put
import torch
from torch import distributed

from trl_callback.config import DeltaSyncConfig
from trl_callback.metrics import Metrics
from trl_callback.session import Subject
from trl_callback.team_session import TeamSession


def main() -> None:
    said = json.loads(sys.argv[1])
    for name, value in said["set"].items():
        module, _, constant = name.partition(".")
        assert hasattr(import_module(f"trl_callback.{module}"), constant)
        setattr(import_module(f"trl_callback.{module}"), constant, value)
    slow_put.install_for_files(said.get("slow_files", 0))
    distributed.init_process_group("gloo")
    config = DeltaSyncConfig.build(f"{said['folder']}/run", **said["settings"])
    model = torch.nn.Linear(8, 8)
    session = TeamSession(Subject(model, None, "BF16", 0), config, None, Metrics())
    with torch.no_grad():
        model.weight += distributed.get_rank() + 1
    session.step_done(1)
    session.finish(1)
    print(f"rank {distributed.get_rank()} finished", flush=True)
    session.close()
    os._exit(0)  # a thread that hangs, if any, must not keep this process


if __name__ == "__main__":
    main()
