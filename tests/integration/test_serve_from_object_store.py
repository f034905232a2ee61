"""One real ``vllm serve --delta-sync s3://…`` whose credentials may only read follows a run in a bucket."""

from __future__ import annotations

from helpers.fault_proxy import WRITES, Fault, FaultProxy
from helpers.moto_server import ENVIRONMENT
from helpers.publish import Publisher
from helpers.server import VllmServer
from helpers.tiny_models import build

from delta_sync.ledger import Ledger
from delta_sync.store import open_store

CONFIG = '{"replica": "box", "read_back": true, "acknowledge": false}'
FORBIDDEN = Fault(status=403, code="AccessDenied", message="Access Denied")


def test_a_server_that_may_only_read_follows_a_run_in_a_bucket(moto, proxy, bucket, tmp_path) -> None:
    base, uri = build(tmp_path / "base"), f"s3://{bucket}/run"
    with FaultProxy(moto, lambda request: FORBIDDEN if request.method in WRITES else None) as read_only:
        environment = {**ENVIRONMENT, "AWS_ENDPOINT_URL": read_only.url}
        flags = ("--delta-sync", uri, "--delta-sync-config", CONFIG)
        with VllmServer(base, tmp_path / "server.log", flags, environment) as server:
            trainer = Publisher.of_checkpoint(uri, base)
            server.wait_version(trainer.origin().version)
            for seed in range(3):
                server.wait_version(trainer.step(seed).version)
            for name, bits in trainer.weights.items():
                assert server.get_bytes(f"/delta_sync/tensors/{name}")[0] == bits.tobytes(), name
            assert server.status()["refusal"] is None
            assert not set(read_only.counts()) & set(WRITES), "it tried to write"
            read_only.rule = lambda _: Fault(status=503, code="SlowDown")
            trainer.step(4)
            status = server.wait_status("the store's failure", lambda s: "fewer requests" in str(s), timeout=120)
            assert status["version"] == 4, "it serves on"
            read_only.rule = None
            server.wait_version(5)
    assert Ledger(open_store(uri)).acknowledgements() == {}
