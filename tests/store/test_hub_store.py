"""The Hub store beside the stock client, and when things go wrong: refusals, lies, silence, lost answers."""

from __future__ import annotations

import hashlib
import json
import os
import pty
import sys
import termios
import threading
import time

import pytest
from helpers.child import child
from huggingface_hub import HfApi

from delta_sync.errors import ConflictError, IntegrityError, NotFoundError, StoreError
from delta_sync.store import open_store
from delta_sync.store.hub import HubStore
from delta_sync.store.hub_uri import parse_hub_place

DATA = os.urandom(300_000)


@pytest.fixture
def uri(hub_bucket):
    return f"hf://buckets/{hub_bucket}/run"


@pytest.fixture
def store(uri):
    return open_store(uri)


def quick(uri, seconds):
    """The same store with less patience."""
    return HubStore(parse_hub_place(uri.removeprefix("hf://")), seconds=seconds)


# --- beside the stock client


def test_what_is_sent_is_what_the_stock_client_sends(hub, hub_bucket, store):
    """One batch call of ours and one of HfApi's, header by header and field by field."""
    HfApi(endpoint=hub.url, token="hf_test_write").batch_bucket_files(
        hub_bucket, add=[(DATA, "run/a.json")], delete=["run/a.json"]
    )
    stock = _batch(hub)
    store.put("a.json", DATA)
    ours = _batch(hub)
    added, _ = [json.loads(line) for line in stock.body.splitlines()]
    mine = json.loads(ours.body)
    assert abs(mine.pop("mtime") - added.pop("mtime")) < 60_000
    assert mine == added
    store.delete("a.json")
    assert json.loads(_batch(hub).body) == json.loads(stock.body.splitlines()[1])
    for header in ("authorization", "content-type"):
        assert ours.headers[header] == stock.headers[header]


def _batch(hub):
    found = [request for request in hub.requests if request.path.endswith("/batch")]
    hub.forget()
    return found[-1]


def test_each_reads_what_the_other_wrote(hub, hub_bucket, store, tmp_path):
    api = HfApi(endpoint=hub.url, token="hf_test_write")
    api.batch_bucket_files(hub_bucket, add=[(DATA, "run/theirs")])
    assert store.get("theirs", max_bytes=len(DATA)) == DATA
    store.put("ours", DATA[::-1])
    api.download_bucket_files(hub_bucket, [("run/ours", str(tmp_path / "ours"))])
    assert (tmp_path / "ours").read_bytes() == DATA[::-1]


def test_requests_for_each_operation(hub, store):
    """What docs/STORES-HUB.md promises; a token for the storage is asked for once in its lifetime."""
    store.put("first", b"1")
    store.get("first", max_bytes=1)
    costs = {}
    for name, call in {
        "put": lambda: store.put("a", DATA),
        "create": lambda: store.create("b", DATA),
        "get": lambda: store.get("a", max_bytes=len(DATA)),
        "range": lambda: store.read_range("a", 5, 5),
        "info": lambda: store.info("a"),
        "list": lambda: list(store.list("")),
        "delete": lambda: store.delete("a"),
    }.items():
        hub.forget()
        call()
        counts = hub.counts()
        costs[name] = counts["api"], counts["resolver"]
    assert costs == {
        "put": (1, 0), "create": (1, 2), "get": (0, 1), "range": (0, 1), "info": (0, 1), "list": (1, 0),
        "delete": (1, 1),
    }  # fmt: skip


def test_listing_has_pages_and_begins_where_asked(hub, hub_bucket, store):
    HfApi(endpoint=hub.url, token="hf_test_write").batch_bucket_files(
        hub_bucket, add=[(b"%d" % n, f"run/m/{n:04d}") for n in range(350)]
    )
    store.put("n", b"")
    hub.forget()
    assert [info.key for info in store.list("m/")] == [f"m/{n:04d}" for n in range(350)]
    assert hub.counts()["api"] == 4
    hub.forget()
    assert [info.key for info in store.list("m/012")] == [f"m/{n:04d}" for n in range(120, 130)]
    assert hub.counts()["api"] == 1


# --- refusals


@pytest.mark.parametrize(
    ("token", "bucket_id", "says"),
    [
        ("hf_wrong", None, "settings/tokens"),
        ("hf_test_read", None, "a token that may write"),
        ("", None, "hf auth login"),
        ("hf_test_write", "org/nothing-there", "hf buckets create org/nothing-there"),
    ],
)
def test_refusals_name_the_remedy_and_never_the_token(hub, hub_bucket, monkeypatch, token, bucket_id, says):
    hub.api.buckets[hub_bucket].private = True
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    else:
        monkeypatch.delenv("HF_TOKEN")
    store = open_store(f"hf://buckets/{bucket_id or hub_bucket}")
    started = time.monotonic()
    with pytest.raises(StoreError) as caught:
        store.put("a", b"x")
    assert says in str(caught.value)
    assert "hf_test" not in str(caught.value)
    assert "hf_wrong" not in str(caught.value)
    assert time.monotonic() - started < 2  # refused is refused: no retries


def test_a_reader_of_a_missing_bucket_is_told_so(hub):
    store = open_store("hf://buckets/org/nothing-there")
    for call in (lambda: store.get("a", max_bytes=1), lambda: list(store.list(""))):
        with pytest.raises(StoreError, match="hf buckets create") as caught:
            call()
        assert not isinstance(caught.value, NotFoundError)


def test_a_read_token_reads(hub, store, uri, monkeypatch):
    store.put("a", DATA)
    monkeypatch.setenv("HF_TOKEN", "hf_test_read")
    assert open_store(uri).get("a", max_bytes=len(DATA)) == DATA


# --- passing trouble


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("status", {"status": 500}),
        ("status", {"status": 503, "headers": {"Retry-After": "0"}}),
        ("status", {"status": 429, "headers": {"RateLimit": '"api";r=0;t=0'}}),
        ("drop", {}),
        ("drop after", {}),
        ("delay", {"seconds": 0.3}),
    ],
)
def test_every_operation_survives_one_fault_of_each_kind_at_each_request(hub, store, kind, more):
    where = ["batch", "resolve", "xet-write-token", "xet-read-token", "shards", "reconstructions", "cas/xorbs", "tree"]
    for number, part in enumerate(where):
        hub.cas.expire_tokens()
        fresh = open_store(store.uri)
        hub.faults.add(kind, part, times=1, **more)
        data = DATA + b"%d" % number
        fresh.put(f"a/{number}", data)
        assert fresh.get(f"a/{number}", max_bytes=10**6) == data
        fresh.create(f"c/{number}", data)
        assert [info.key for info in fresh.list("a/")][-1] == f"a/{number}"
        fresh.delete(f"c/{number}")
    assert sum(hub.faults.met.values()) == len(where)


def test_a_rate_limit_that_lasts_is_said_at_once(hub, uri):
    store = quick(uri, 5)
    store.put("a", b"x")
    store.get("a", max_bytes=1)
    hub.faults.add("status", "tree", status=429, headers={"RateLimit": '"api";r=0;t=55'})
    started = time.monotonic()
    with pytest.raises(StoreError, match=r"rate limit is used up for 5\d s.*STORES-HUB"):
        list(store.list(""))
    assert time.monotonic() - started < 2
    hub.forget()
    with pytest.raises(StoreError, match="rate limit"):
        list(store.list(""))  # and nothing is sent until it is over
    assert hub.counts() == {}
    assert store.get("a", max_bytes=1) == b"x"  # the resolvers have a budget of their own


def test_a_storm_of_429_is_waited_out(hub, uri):
    store = quick(uri, 20)
    hub.faults.add("status", "", status=429, headers={"Retry-After": "0.3"}, rate=0.3)
    for number in range(5):
        store.put(f"a/{number}", b"%d" % number)
    assert [store.get(f"a/{number}", max_bytes=9) for number in range(5)] == [b"%d" % n for n in range(5)]
    assert hub.faults.met["status 429"] >= 5


@pytest.mark.parametrize("part", ["batch", "resolve", "tree", "xet-read-token", "reconstructions", "GET /cas/xorbs"])
def test_nothing_waits_past_its_deadline_for_a_hub_that_is_silent(hub, store, uri, part):
    store.put("a", DATA)
    hub.faults.add("stall", part, seconds=30)
    fresh = quick(uri, 2)
    started = time.monotonic()
    with pytest.raises(StoreError, match=r"in time|within \d s|answer"):
        fresh.put("b", DATA[:1000])
        fresh.get("a", max_bytes=len(DATA))
        list(fresh.list(""))
    assert time.monotonic() - started < 6


def test_an_upload_that_stalls_ends_at_the_deadline_and_does_not_block_the_next(hub, uri):
    store = quick(uri, 3)
    store.put("a", b"opens the session")
    hub.faults.add("stall", "POST /cas/v./xorb", seconds=30, times=1)
    started = time.monotonic()
    with pytest.raises(StoreError, match=r"within \d s"):
        store.put("b", os.urandom(500_000))
    assert time.monotonic() - started < 6
    data = os.urandom(500_000)
    store.put("c", data)
    assert store.get("c", max_bytes=len(data)) == data


def test_an_expired_token_is_replaced(hub, store):
    store.put("a", DATA)
    assert store.get("a", max_bytes=len(DATA)) == DATA
    hub.cas.expire_tokens()
    hub.forget()
    assert store.get("a", max_bytes=len(DATA)) == DATA
    store.put("b", DATA[1:])
    assert store.get("b", max_bytes=len(DATA)) == DATA[1:]
    assert sum("token" in line for _, line in hub.asked) == 2


# --- lies


def test_a_flipped_byte_passes_the_store_and_is_seen_by_the_ledger(hub, store):
    """Xet verifies nothing on the way down; the hash in the manifest does."""
    from delta_sync.ledger import Ledger
    from delta_sync.manifest import ObjectRef

    store.put("a", DATA)
    ref = ObjectRef("a", len(DATA), hashlib.sha256(DATA).hexdigest())
    hub.faults.add("flip", "GET /cas/xorbs", times=1)
    with pytest.raises(IntegrityError, match="sha256 of object a"):
        Ledger(store).read_object(ref)
    assert Ledger(store).read_object(ref) == DATA


def test_a_flipped_byte_is_not_remembered(hub, store):
    store.put("small", DATA[:500])
    store.follow()
    try:
        hub.faults.add("flip", "GET /cas/xorbs", times=1)
        read = [store.get("small", max_bytes=10**6) for _ in range(5)]
        assert read[0] != read[1]
        assert read[1:] == [DATA[:500]] * 4
    finally:
        store.close()


def test_a_batch_that_failed_with_status_200_is_no_success(hub, store):
    """BucketBatchError in the stock client: the Hub says 200 and lists what failed."""
    hub.faults.add("fail some", "batch", text="run/bad")
    store.put("good", b"1")
    with pytest.raises(StoreError, match="Internal error"):
        store.put("bad", b"1")
    with pytest.raises(NotFoundError):
        store.info("bad")


def test_an_object_larger_than_asked_for_is_not_downloaded(hub, store):
    store.put("a", DATA)
    hub.forget()
    with pytest.raises(IntegrityError):
        store.get("a", max_bytes=len(DATA) - 1)
    assert hub.counts()["cas"] == 0


def test_content_that_the_storage_lost(hub, store, hub_bucket):
    store.put("a", DATA)
    lost = hub.api.buckets[hub_bucket].files["run/a"].xet_hash
    terms = hub.cas.files.pop(lost)
    started = time.monotonic()
    with pytest.raises(StoreError, match="a path without content"):
        store.get("a", max_bytes=len(DATA))
    assert time.monotonic() - started < 5
    hub.cas.files[lost] = terms
    assert store.get("a", max_bytes=len(DATA)) == DATA


# --- create-only writes


def test_create_whose_answer_was_lost_is_the_creators(hub, store):
    hub.faults.add("drop after", "batch", times=1)
    store.create("a", b"mine")
    assert store.get("a", max_bytes=4) == b"mine"


def test_two_processes_creating_at_once_are_detected(hub, uri):
    """Two stores stand for two processes: the one whose object was replaced before it looked back is told."""
    first, second = open_store(uri), open_store(uri)
    written = threading.Event()
    name = first._name

    def name_and_let_the_other_write(*args):
        name(*args)
        second.put("epochs/000001.json", b"the other's")
        written.set()

    first._name = name_and_let_the_other_write
    with pytest.raises(ConflictError, match="another's"):
        first.create("epochs/000001.json", b"mine")
    assert written.is_set()


# --- opening


@pytest.mark.parametrize(
    "uri",
    ["hf://buckets", "hf://buckets/org", "hf://models/org/name", "hf://org/name", "hf://buckets/o/n/../x", "hf://"],
)
def test_other_hub_uris_are_refused(uri):
    with pytest.raises(StoreError, match="hf://buckets/ORG/NAME"):
        open_store(uri)


def test_the_uri_may_end_in_a_slash(hub_bucket, hub):
    open_store(f"hf://buckets/{hub_bucket}/run/").put("a", b"1")
    assert open_store(f"hf://buckets/{hub_bucket}").get("run/a", max_bytes=1) == b"1"


def test_without_the_extra_the_error_names_it(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "delta_sync.store.hub", None)
    with pytest.raises(StoreError, match=r"delta-weight-sync\[hub\]"):
        open_store("hf://buckets/org/name")


def test_a_large_file_goes_up_from_disk(hub, store, tmp_path, monkeypatch):
    monkeypatch.setattr("delta_sync.store.hub_xet.SHOWN_FROM", 1000)
    source = tmp_path / "shard"
    source.write_bytes(os.urandom(5_000_000))
    store.put_file("anchor/shard", source)
    assert store.get("anchor/shard", max_bytes=10**7) == source.read_bytes()
    assert store.read_range("anchor/shard", 3_000_000, 100) == source.read_bytes()[3_000_000:3_000_100]
    with pytest.raises(StoreError, match=r"read .*missing"):
        store.put_file("anchor/none", tmp_path / "missing")


def test_a_terminal_gets_a_bar_for_a_large_upload_and_download(hub, hub_bucket):
    code = (
        "import os\nfrom delta_sync.store import hub_xet, open_store\nhub_xet.SHOWN_FROM = 1_000_000\n"
        f"store = open_store('hf://buckets/{hub_bucket}')\ndata = os.urandom(5_000_000)\nstore.put('shard', data)\n"
        "assert store.get('shard', max_bytes=10**7) == data\n"
        "assert store.read_range('shard', 4_000_000, 1_000_000) == data[4_000_000:]\n"
        "store.read_range('shard', 0, 100)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_DISABLE_PROGRESS_BARS"}
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (40, 200))
    here = {**environment, "PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm"}
    with child([sys.executable, "-c", code], stderr=slave, env=here) as process:
        assert process.wait(60) == 0
    os.close(slave)
    shown = os.read(master, 1 << 20).decode()
    os.close(master)
    assert "write object shard" in shown
    last = [line for line in shown.replace("\n", "\r").split("\r") if "read object shard" in line]
    assert len(last) >= 2
    assert all("5.00M/5.00M" in line for line in (last[-1], shown.rstrip().rpartition("\r")[2]))


def test_a_forked_child_opens_connections_of_its_own(hub, store):
    """Sharing the parent's would mix up answers, and hf_xet's threads do not exist in the child."""
    import multiprocessing

    store.put("a", DATA)
    store.get("a", max_bytes=len(DATA))
    child = multiprocessing.get_context("fork").Process(target=_read_and_write, args=(store,), daemon=True)
    child.start()
    child.join(120)
    assert child.exitcode == 0
    assert store.get("b", max_bytes=len(DATA)) == DATA[::-1]


def _read_and_write(store):
    assert store.get("a", max_bytes=len(DATA)) == DATA
    store.put("b", DATA[::-1])


JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize(
    ("where", "headers", "text"),
    [
        ("batch", JSON, "[]"),
        ("batch", {}, "<html>a proxy's page</html>"),
        ("tree", {}, "<html>a proxy's page</html>"),
        ("xet-write-token", {}, "<html>a proxy's page</html>"),
        ("batch", JSON, '{"failed": 1}'),
        ("tree", JSON, '{"a": 1}'),
        ("tree", JSON, '[{"type": "file", "path": "run/x"}]'),
        ("tree", JSON, "[1]"),
        ("tree", JSON, '[{"type": "file", "path": "run/x", "size": "many", "xetHash": 1}]'),
        ("tree", {**JSON, "Link": '<http://other.invalid/more>; rel="next"'}, "[]"),
        ("xet-write-token", JSON, '{"casUrl": "nowhere", "exp": 99999999999, "accessToken": "x"}'),
        ("xet-read-token", JSON, "null"),
        ("xet-read-token", JSON, '{"casUrl": "http://127.0.0.1:1", "exp": 99999999999, "accessToken": "x"}'),
        ("resolve", {}, ""),
        ("resolve", {"X-Xet-Hash": "../../etc", "X-Linked-Size": "5"}, ""),
        ("resolve", {"X-Xet-Hash": "0" * 64, "X-Linked-Size": "-5"}, ""),
        ("resolve", {"X-Xet-Hash": "ab" * 32, "X-Linked-Size": "99999999999999999999999"}, ""),
        ("reconstructions", JSON, '{"terms": 5}'),
        ("GET /cas/xorbs", {}, "not a xorb"),
    ],
)
def test_an_answer_that_makes_no_sense_is_one_of_our_errors(hub, uri, where, headers, text):
    quick(uri, 20).put("a", DATA[:2000])
    hub.faults.add("status", where, status=200, headers=headers, text=text)
    store = quick(uri, 2)
    with pytest.raises((StoreError, IntegrityError)) as caught:
        store.put("b", DATA[2000:4000])
        store.get("a", max_bytes=10**6)
        list(store.list(""))
    assert "hf_test" not in str(caught.value)


ESCAPING = ["run/../../etc/passwd", "run//a", "run/", "run/./a", "run/a\\..\\b", "run/a\nb", "run/.delta-sync-tmp-x"]


@pytest.mark.parametrize("follows", [False, True])
def test_keys_that_lead_out_are_in_no_listing(hub, uri, follows):
    """Whatever a Hub, or somebody who writes to the bucket with other tools, has there."""
    rows = [{"type": "file", "path": path, "size": 5, "xetHash": "ab" * 32} for path in (*ESCAPING, "run/good")]
    store = quick(uri, 5)
    hub.faults.add("status", "tree", status=200, headers=JSON, text=json.dumps(rows))
    if follows:
        store.follow()
        deadline = time.monotonic() + 60
        while not store._view.answers:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert [info.key for info in store.list("")] == ["good"]
    store.close()
