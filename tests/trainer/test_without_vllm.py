"""The trainer's side on a box that has no vLLM: blocked in a fresh process, a whole GRPO run works."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import tiny
from stand_in_replica import StandInReplica

HERE = Path(__file__).parent
CHILD = """
import sys
sys.path.insert(0, sys.argv[1])
import no_vllm, grpo, tiny
from trl.import_utils import is_vllm_available
assert not is_vllm_available()
from trl_callback import DeltaSyncCallback
_, _, folder, url, uri = sys.argv
trainer = grpo.grpo_trainer(folder, model=tiny.llama(), url=url, use_vllm=True, max_steps=2,
                            callbacks=[DeltaSyncCallback(uri, sync_timeout=60)])
trainer.train()
assert not [name for name in sys.modules if name.partition(".")[0] == "vllm"]
print("trained", trainer.state.global_step)
"""


def test_grpo_runs_where_vllm_is_not_installed(tmp_path: Path) -> None:
    uri = str(tmp_path / f"bucket-{uuid.uuid4().hex}")
    with StandInReplica(uri, tiny.llama()).running() as replica:
        done = subprocess.run(
            [sys.executable, "-c", CHILD, str(HERE), str(tmp_path / "out"), replica.url, uri],
            capture_output=True, text=True, timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "trained 2" in done.stdout
    assert replica.generated_at == [1, 2]
