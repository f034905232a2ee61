"""Two ranks of one model without an engine: each loads its part, maps it, takes an update, compares with a fresh load.

Run as ``python rank_pair.py RANK PORT JOBS``, once a rank; JOBS is a JSON list of ``[family, checkpoint, run, new,
engine options]``. Rank 0 prints one JSON line a job. An engine would only add the forward pass, which reads nothing but
what is compared here.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import conftest  # noqa: F401 - vLLM's environment, before vLLM is imported
from helpers import plain_torchvision

if __name__ == "__main__":
    plain_torchvision.install()  # before transformers is imported, which looks once

from family_case import differing, everything, quick_start
from vllm import envs  # noqa: F401 - reads that environment

from delta_sync.plan import Plan, Position
from vllm_delta_plugin.flag import WORKER_EXTENSION


def load(model: str, options: dict[str, Any], rank: int, port: int, ranks: int = 2) -> Any:
    """This rank's model, loaded as a worker does it."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel, parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    args = {"dtype": "bfloat16", "max_model_len": 128, "enforce_eager": True, "skip_tokenizer_init": True, "seed": 0}
    args["worker_extension_cls"] = WORKER_EXTENSION  # by which the plugin knows whose config it is
    config = EngineArgs(model=model, **(args | options)).create_engine_config()
    config.parallel_config.rank = rank
    with set_current_vllm_config(config):
        init_distributed_environment(ranks, rank, f"tcp://127.0.0.1:{port}", rank, "gloo")  # only the first time
        parallel_state.destroy_model_parallel()  # only for a mixture of experts are there groups of its ranks
        parallel = config.parallel_config
        initialize_model_parallel(parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
        return get_model(vllm_config=config)


def run(job: list[Any], rank: int, port: int) -> dict[str, Any]:
    """This rank's part of one job: its regions, and what is not as a fresh load would have it."""
    from delta_sync.ledger import Ledger
    from delta_sync.store.open import open_store
    from vllm_delta_plugin.compat.load_seam import weight_map
    from vllm_delta_plugin.rank_sync import RankSync

    _, old, uri, new, options = job
    expected = everything(load(new, options, rank, port))
    gc.collect()
    model = load(old, options, rank, port)
    sync = RankSync(weight_map(model), {"uri": uri}, rank=rank, world_size=2)
    described = sync.describe()
    ledger = Ledger(open_store(uri))
    origin = ledger.manifest(1)
    plan = ledger.plan(Position(1, origin.sha256), None)
    assert isinstance(plan, Plan)
    sync.stage_begin(plan)
    while (staged := sync.stage_poll())["state"] == "staging":
        time.sleep(0.005)
    assert staged["state"] == "staged", staged
    sync.commit(staged["target"])
    sync.settle(staged["target"])
    return {**described, "parts": staged["parts"], "differing": differing(everything(model), expected)}


def safely(job: list[Any], rank: int, port: int) -> dict[str, Any]:
    """The same, or the error in words: the other rank waits for an answer."""
    from delta_sync.errors import MappingError

    try:
        return run(job, rank, port)
    except MappingError as error:
        return {"refused": str(error)}
    except Exception as error:  # noqa: BLE001 - whatever vLLM cannot do is a result
        return {"failed": "".join(traceback.format_exception(error)[-6:])}


def main(rank: int, port: int, jobs: list[list[Any]]) -> None:
    """All jobs of one way to be parallel."""
    import torch
    import torch.distributed as dist

    from vllm_delta_plugin import worker_seams

    worker_seams.install()
    if not torch.accelerator.is_available():
        torch.accelerator.empty_cache = lambda: None  # as vLLM's own CPU runner has it
    os.environ.setdefault("VLLM_DIST_IDENT", "rank-pair")
    for job in jobs:
        mine = safely(job, rank, port)
        both: list[Any] = [None, None]
        dist.all_gather_object(both, mine)
        if rank == 0:
            print(json.dumps({"family": job[0], "ranks": both}), flush=True)
    dist.destroy_process_group()  # gloo's threads may have torch abort a process that ends without: end_of_rank.py


if __name__ == "__main__":
    with quick_start():
        main(int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
