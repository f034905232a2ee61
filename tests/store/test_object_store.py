"""What only a bucket behind a network can get wrong, over real HTTP: moto, and a proxy that spoils answers."""

from __future__ import annotations

import socket
import threading
import time
import urllib.request

import pytest
from helpers.fault_proxy import Fault, stripping

from delta_sync import ConflictError, IntegrityError, NotFoundError, StoreError
from delta_sync.ledger import Ledger
from delta_sync.store import open_store
from delta_sync.store.object import PART, PROBE, UNFENCED, ObjectStore

IGNORES = stripping("If-None-Match")
FORBIDDEN = Fault(status=403, code="AccessDenied", message="Access Denied")


def is_write(request):
    return request.method != "GET" and request.method != "HEAD"


def is_create_of(key):
    return lambda request: request.method == "PUT" and request.path.endswith(key)


@pytest.fixture
def uri(bucket):
    return f"s3://{bucket}/run"


@pytest.fixture
def store(proxy, uri):
    return open_store(uri)


@pytest.fixture
def hasty(proxy, uri):
    return ObjectStore(uri, timeout=1, retries=2, retry_seconds=1)


# --- create-only writes


def test_a_server_that_ignores_the_condition_is_found_out_before_anything_is_claimed(store, proxy):
    proxy.rule = IGNORES
    for _ in range(2):  # said again each time, not once
        with pytest.raises(StoreError, match="ignores If-None-Match") as caught:
            store.create("epochs/000001.json", b"mine")
        assert UNFENCED in caught.value.remedy
        assert not isinstance(caught.value, ConflictError)
    with pytest.raises(NotFoundError):
        store.info("epochs/000001.json")
    store.put("a", b"readers and plain writes go on")
    assert [info.key for info in store.list("")] == ["a"]


def test_who_never_has_two_trainers_may_say_so(store, proxy, monkeypatch, caplog):
    proxy.rule = IGNORES
    monkeypatch.setenv(UNFENCED, "1")
    store.create("a", b"1")
    with pytest.raises(ConflictError):
        store.create("a", b"2")
    assert store.get("a", max_bytes=9) == b"1"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "detected later" in caplog.text


def test_the_probe_is_asked_once_and_needs_no_right_to_delete(proxy, uri):
    proxy.rule = lambda request: FORBIDDEN if request.method in ("DELETE", "POST") else None
    first = open_store(uri)
    first.create("a", b"1")
    assert proxy.counts() == {"GET": 1, "PUT": 3}  # twice the probe, what is there, and the object
    proxy.requests.clear()
    first.create("b", b"1")
    assert proxy.counts() == {"PUT": 1}
    proxy.requests.clear()
    open_store(uri).create("c", b"1")
    assert proxy.counts() == {"GET": 1, "PUT": 2}  # the probe's object is there already
    assert [info.key for info in first.list("")] == ["a", "b", "c"]


def test_readers_need_no_right_to_write(store, proxy, uri):
    store.put("manifests/x", b"1")
    proxy.rule = lambda request: FORBIDDEN if is_write(request) else None
    reader = open_store(uri)
    assert reader.get("manifests/x", max_bytes=1) == b"1"
    assert reader.read_range("manifests/x", 0, 1) == b"1"
    assert [info.key for info in reader.list("")] == ["manifests/x"]
    assert Ledger(reader).head() is None
    for write in (lambda: reader.create("a", b""), lambda: reader.put("a", b"")):
        with pytest.raises(StoreError, match="on a trainer, write it"):
            write()


LOST = {
    "answer dropped": Fault(drop=True, after=True),
    "error after it was done": Fault(status=500, code="InternalError", after=True),
    "never done": Fault(drop=True),
    "busy": Fault(status=503, code="SlowDown"),
    "two at once, neither kept": Fault(status=409, code="ConditionalRequestConflict"),
}


@pytest.mark.parametrize("fault", LOST.values(), ids=LOST.keys())
def test_a_create_whose_answer_was_lost_is_settled(store, proxy, fault):
    store.create("before", b"")
    proxy.fail_next(fault, 2, is_create_of("/a"))
    store.create("a", b"mine")
    assert store.get("a", max_bytes=9) == b"mine"
    with pytest.raises(ConflictError):
        store.create("a", b"mine")  # nothing was lost this time: somebody else could have the same bytes


def test_a_create_that_times_out_after_it_was_done_is_settled(hasty, proxy):
    hasty.create("before", b"")
    slow = Fault(hang=1.5, after=True)
    proxy.fail_next(slow, 1, is_create_of("/a"))
    hasty.create("a", b"mine")
    assert hasty.get("a", max_bytes=9) == b"mine"


def test_a_lost_create_that_another_won_is_a_conflict(store, proxy, uri):
    other = open_store(uri)
    store.create("before", b"")
    for theirs in (b"they", b"longer than mine"):
        other.delete("a")
        won = Fault(call=lambda theirs=theirs: other.put("a", theirs), drop=True)
        proxy.fail_next(
            won, 1, lambda request: is_create_of("/a")(request) and "If-None-Match" in str(request.headers).title()
        )
        with pytest.raises(ConflictError):
            store.create("a", b"mine")
        assert other.get("a", max_bytes=99) == theirs


def test_a_server_that_never_settles_a_create_is_a_store_error(hasty, proxy):
    hasty.create("before", b"")
    proxy.rule = lambda request: LOST["two at once, neither kept"] if is_create_of("/a")(request) else None
    with pytest.raises(StoreError) as caught:
        hasty.create("a", b"mine")
    assert not isinstance(caught.value, ConflictError)


# --- errors and what to do about them

REFUSALS = [
    (403, "AccessDenied", "let these credentials list and read"),
    (403, "SignatureDoesNotMatch", "check the credentials"),
    (403, "InvalidAccessKeyId", "check the credentials"),
    (401, "Unauthorized", "check the credentials"),
    (400, "ExpiredToken", "renew the session token"),
    (403, "RequestTimeTooSkewed", "clock"),
    (400, "AuthorizationHeaderMalformed", "AWS_REGION"),
    (301, "PermanentRedirect", "AWS_REGION"),
    (404, "NoSuchBucket", "create the bucket"),
    (503, "SlowDown", "fewer requests"),
    (507, "XMinioStorageFull", "free space"),
    (400, "SomethingNew", "try again"),
]


def test_a_refusal_is_told_by_its_status_and_not_by_digits_of_the_address(proxy, uri):
    store = ObjectStore(f"{uri}/416", retries=1)
    proxy.rule = lambda request: Fault(status=400, code="ExpiredToken", message="the server's words")
    with pytest.raises(StoreError, match="renew the session token"):
        store.read_range("a", 0, 1)


@pytest.mark.parametrize(("status", "code", "remedy"), REFUSALS)
def test_what_a_server_refuses_says_what_to_do(proxy, uri, status, code, remedy):
    store = ObjectStore(uri, retries=1)
    proxy.rule = lambda request: Fault(status=status, code=code, message="the server's words")
    for call in (
        lambda: store.get("a", max_bytes=1),
        lambda: store.read_range("a", 0, 1),
        lambda: list(store.list("a/")),
        lambda: store.put("a", b""),
        lambda: store.create("a", b""),
        lambda: store.delete("a"),
    ):
        with pytest.raises(StoreError, match=remedy) as caught:
            call()
        assert not isinstance(caught.value, NotFoundError)
        assert "not-a-secret" not in str(caught.value)
        assert caught.value.__cause__ is None  # the client's own error may hold a signed URL
        if 400 <= status < 500 and code != "NoSuchBucket":
            assert f"{code}: the server's words" in str(caught.value)


def test_a_bucket_that_is_not_there(proxy):
    store = open_store("s3://no-such-bucket/run")
    for call in (
        lambda: store.get("a", max_bytes=1),
        lambda: list(store.list("")),
        lambda: store.put("a", b""),
        lambda: store.create("a", b""),
    ):
        with pytest.raises(StoreError, match="create the bucket"):
            call()


def test_nobody_listens(monkeypatch, proxy, uri):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(StoreError, match="check the endpoint's variable"):
        ObjectStore(uri, retries=0).get("a", max_bytes=1)


def test_plain_http_only_where_the_endpoint_says_so(monkeypatch, proxy, uri):
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url.replace("http:", "https:"))
    with pytest.raises(StoreError):
        ObjectStore(uri, retries=0).get("a", max_bytes=1)
    assert proxy.requests == []


def test_faults_that_pass_are_not_seen(store, proxy):
    store.put("a", b"0123456789")
    for fault in (Fault(status=500, code="InternalError"), Fault(drop=True), Fault(truncate=5)):
        for call in (
            lambda: store.get("a", max_bytes=10) == b"0123456789",
            lambda: store.read_range("a", 2, 8) == b"23456789",
            lambda: [info.size for info in store.list("a")] == [10],
            lambda: store.put("b", b"x") is None,
        ):
            proxy.fail_next(fault, 2)
            assert call()


@pytest.mark.timeout(120)
def test_a_server_that_hangs_meets_a_deadline(hasty, proxy):
    hasty.put("a", b"1")
    proxy.rule = lambda request: Fault(hang=20)
    for call in (
        lambda: hasty.get("a", max_bytes=1),
        lambda: hasty.read_range("a", 0, 1),
        lambda: hasty.info("a"),
        lambda: list(hasty.list("")),
        lambda: hasty.put("a", b""),
        lambda: hasty.create("a", b""),
        lambda: hasty.delete("a"),
    ):
        start = time.monotonic()
        with pytest.raises(StoreError, match="timed out"):
            call()
        assert time.monotonic() - start < 5


def raw_server(answer):
    """Every connection gets ``answer`` to whatever it asks, and then silence."""
    listener = socket.create_server(("127.0.0.1", 0))
    kept = []

    def serve():
        while True:
            connection, _ = listener.accept()
            kept.append(connection)
            connection.recv(65536)
            connection.sendall(answer)

    threading.Thread(target=serve, daemon=True).start()
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


HEADERS = b'HTTP/1.1 200 OK\r\nETag: "x"\r\nLast-Modified: Wed, 21 Oct 2015 07:28:00 GMT\r\nContent-Length: %d\r\n\r\n'


def test_what_is_too_large_is_refused_by_its_header(monkeypatch, proxy, uri):
    monkeypatch.setenv("AWS_ENDPOINT_URL", raw_server(HEADERS % 10**13 + b"x" * 1000))
    start = time.monotonic()
    with pytest.raises(IntegrityError, match=str(10**13)):
        open_store(uri).get("a", max_bytes=10**6)
    assert time.monotonic() - start < 5  # the silence after it was not waited for


def test_an_answer_that_never_ends_meets_the_deadline(monkeypatch, proxy, uri):
    monkeypatch.setenv("AWS_ENDPOINT_URL", raw_server(HEADERS % 1000 + b"x"))
    with pytest.raises(StoreError):
        ObjectStore(uri, timeout=1, retries=0).get("a", max_bytes=10**6)


LISTING = (
    '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult><IsTruncated>false</IsTruncated><Contents><Key>{}</Key>'
    "<Size>5</Size><LastModified>2015-10-21T07:28:00.000Z</LastModified><ETag>x</ETag></Contents></ListBucketResult>"
)


@pytest.mark.parametrize("key", ["run/../../etc/passwd", "run//a", "run/./a", "run/a\\b", "run/.delta-sync-tmp-x"])
def test_a_listing_that_lies_leads_nowhere(monkeypatch, proxy, uri, key):
    """A server that answers with keys that no key may be: they are left out, or the listing is refused.

    A key of another prefix would be harmless: whatever is read is asked for below this store's own.
    """
    body = LISTING.format(key).encode()
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/xml\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    monkeypatch.setenv("AWS_ENDPOINT_URL", raw_server(head % len(body) + body))
    try:
        found = [info.key for info in ObjectStore(uri, timeout=2, retries=0).list("")]
    except StoreError as error:
        assert "list" in str(error)
    else:
        assert found == []


def test_a_listing_by_hand_is_read(monkeypatch, proxy, uri):
    """The test above would see a key that is one."""
    body = LISTING.format("run/a").encode()
    monkeypatch.setenv(
        "AWS_ENDPOINT_URL", raw_server(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    )
    assert [info.key for info in ObjectStore(uri, timeout=2, retries=0).list("")] == ["a"]


# --- large objects


@pytest.fixture(scope="module")
def large():
    return bytes(range(251)) * (2 * PART // 251 + 30_000)  # more than two parts, no two alike


def test_a_large_object_goes_and_comes_in_parts(store, proxy, large, tmp_path):
    source = tmp_path / "shard"
    source.write_bytes(large)
    store.put_file("a", source)
    assert proxy.counts() == {"POST": 2, "PUT": 3}
    proxy.requests.clear()
    assert store.get("a", max_bytes=len(large)) == large
    assert proxy.counts() == {"GET": 4}  # the whole one, given up at its header, and three ranges
    assert store.read_range("a", 5, PART) == large[5 : PART + 5]
    assert store.read_range("a", 3, PART + 5) == large[3 : PART + 8]
    with pytest.raises(IntegrityError):
        store.read_range("a", PART, 2 * PART)
    with pytest.raises(IntegrityError):
        store.get("a", max_bytes=len(large) - 1)
    store.put("b", memoryview(large)[1:])
    assert store.get("b", max_bytes=len(large)) == large[1:]


def test_an_upload_that_ends_early_leaves_nothing(store, proxy, large):
    proxy.rule = lambda request: FORBIDDEN if "partNumber=2" in request.path else None
    with pytest.raises(StoreError):
        store.put("a", large)
    with pytest.raises(NotFoundError):
        store.info("a")
    assert list(store.list("")) == []


def test_an_object_replaced_while_it_is_read_is_not_taken_for_one(store, proxy, large, uri):
    store.put("a", large)
    other = open_store(uri)
    ranged = lambda request: "range" in {name.lower() for name in request.headers}  # noqa: E731
    proxy.fail_next(Fault(call=lambda: other.put("a", large[::-1])), 1, ranged)
    with pytest.raises(IntegrityError, match="read it again"):
        store.get("a", max_bytes=len(large))


def test_a_source_that_cannot_be_read(store, tmp_path):
    with pytest.raises(NotFoundError, match="missing"):
        store.put_file("a", tmp_path / "missing")


# --- listings


def test_listings_page_and_begin_near_what_is_asked_for(store, proxy):
    for number in range(1050):
        store.put(f"manifests/{number:012d}-000001-w.json", b"")
    proxy.requests.clear()
    assert len(list(store.list("manifests/"))) == 1050
    assert proxy.counts() == {"GET": 2}
    proxy.requests.clear()
    assert len(list(store.list("manifests/000000001040-"))) == 1
    assert len(list(store.list("manifests/000000000003-"))) == 1
    assert proxy.counts() == {"GET": 2}


def put_raw(url):
    urllib.request.urlopen(urllib.request.Request(url, method="PUT"), timeout=30).close()


def test_what_others_keep_in_the_bucket_is_not_ours(store, bucket, uri, moto):
    whole, beside = open_store(f"s3://{bucket}"), open_store(f"s3://{bucket}/run-2")
    beside.put("a", b"")
    whole.put("runs", b"")
    store.put("a/b", b"1")
    put_raw(f"{moto}/{bucket}/run/")  # what consoles leave behind for folders
    put_raw(f"{moto}/{bucket}/run/a/")
    assert "a/b" in [info.key for info in store.list("")]
    assert not any("-2" in info.key or info.key in ("runs", "") for info in store.list(""))
    assert [info.key for info in store.list("a/")] == ["a/b"]
    assert [info.key for info in whole.list("run-2")] == ["run-2/a"]
    store.create("b", b"")
    assert PROBE not in [info.key for info in store.list("")]
    put_raw(f"{moto}/{bucket}/run/x//y")
    with pytest.raises(StoreError, match="remove that object"):
        store.list("")
