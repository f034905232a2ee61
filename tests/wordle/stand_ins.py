"""Programs that stand where vLLM and the trainer stand, and the demo started with them; run as a script
with the repository's root and its tests folder on PYTHONPATH.

stand_ins.py server BUCKET CHECKPOINT PORT FAULT     follows the bucket with the real core, streams slowly
stand_ins.py trainer BUCKET CHECKPOINT OUTPUT FAULT  publishes with the real core, writes what train.py writes
stand_ins.py demo CHECKPOINT OUTPUT FAULT            the real demo, with these two
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.responses import Response, StreamingResponse
from helpers.publish import Publisher, read_checkpoint

from delta_sync.delta import apply
from delta_sync.delta_file import decode_delta
from delta_sync.ledger import Ledger
from delta_sync.store.open import open_store
from examples.wordle import commands, demo

STEPS = 8


class Replica:
    """Weights that follow the newest version, one version at a time."""

    def __init__(self, bucket: str, checkpoint: Path) -> None:
        self.weights, self.dtypes = read_checkpoint(checkpoint)
        self.ledger, self.version = Ledger(open_store(bucket)), 0

    def follow(self) -> None:
        head = self.ledger.head()
        while head is not None and self.version < head.version:
            manifest = self.ledger.manifest(self.version + 1)
            for ref in manifest.objects:
                for delta in decode_delta(self.ledger.read_object(ref))[1]:
                    apply(delta, self.weights[delta.name].reshape(-1))
            self.version += 1


def server(bucket: str, checkpoint: str, port: str, fault: str) -> None:
    replica, app = Replica(bucket, Path(checkpoint)), FastAPI()
    if fault == "server dies":
        raise SystemExit("no kernel for this card")
    app.add_api_route("/health", lambda: {})
    app.add_api_route("/v1/models", lambda: {"data": [{"id": "stand-in"}]})

    @app.get("/delta_sync/status")
    def status() -> dict[str, Any]:
        replica.follow()
        return {"version": replica.version or None, "state": "live"}

    @app.get("/delta_sync/tensors")
    def tensors() -> dict[str, Any]:
        return {"version": replica.version, "tensors": {name: {} for name in replica.weights}}

    @app.get("/delta_sync/tensors/{name}")
    def tensor(name: str) -> Response:
        bits = replica.weights[name].copy()
        if "wrong bit" in fault and name == "b":
            bits.reshape(-1)[7] ^= 1
        shape = ",".join(map(str, bits.shape))
        headers = {"X-Dtype": replica.dtypes[name], "X-Shape": shape, "X-Version": str(replica.version)}
        return Response(bits.tobytes(), headers=headers)

    @app.post("/v1/completions")
    async def complete(body: dict[str, Any]) -> StreamingResponse:
        async def events() -> Any:
            for i in range(body["max_tokens"]):
                await asyncio.sleep(0.02)
                last = "length" if i + 1 == body["max_tokens"] else None
                if "stream dropped" in fault and i == 40:
                    return
                yield f"data: {json.dumps({'choices': [{'text': 'x', 'finish_reason': last}]})}\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="error")


def trainer(bucket: str, checkpoint: str, output: str, fault: str) -> None:
    publisher, folder = Publisher.of_checkpoint(bucket, Path(checkpoint)), Path(output)
    folder.mkdir(parents=True)
    publisher.origin()
    for step in range(1, STEPS + 1):
        time.sleep(60 if fault == "hangs" and step == 3 else 0.3)
        if fault == "trainer dies" and step == 3:
            raise SystemExit("loss is NaN")
        publisher.step(seed=step)
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "loss": 0.1, "reward": 0.5 + step / 100}) + "\n")
    (folder / "final").mkdir()
    publisher.save(folder / "final" / "kept", Path(checkpoint))
    (folder / "final" / "kept" / "model.safetensors").rename(folder / "final" / "model.safetensors")


def run_demo(checkpoint: str, output: str, fault: str) -> None:
    def ours(*arguments: object) -> list[str]:
        return [sys.executable, __file__, *map(str, arguments), fault]

    commands.vllm_serve = lambda args, model, bucket, port: ours("server", bucket, model, port)
    commands.train = lambda args, model, bucket, output, vllm, env: ours("trainer", bucket, model, output)
    sys.argv = ["demo", "--model", checkpoint, "--output", output, "--steps", str(STEPS), "--context", "200"]
    sys.exit(demo.main())


if __name__ == "__main__":
    {"server": server, "trainer": trainer, "demo": run_demo}[sys.argv[1]](*sys.argv[2:])
