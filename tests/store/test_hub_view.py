"""A replica that follows a bucket: what it asks of the Hub idle and active, and what it sees when the feed fails."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import chain, repeat

import httpx2
import pytest

from delta_sync.store import hub_view, open_store
from delta_sync.store.hub_xet import XetFile


def until(true, seconds=15.0):
    """Wait for something that has to come true."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.01)


@pytest.fixture
def uri(hub_bucket):
    return f"hf://buckets/{hub_bucket}/run"


@pytest.fixture
def writer(hub, uri):
    return open_store(uri)


@pytest.fixture
def replica(hub, uri):
    store = open_store(uri)
    yield store
    store.close()


def follow(store):
    store.follow()
    until(lambda: store._view.answers)


def sees(store, key, data):
    """Whether the followed view, not the Hub, has this object by now."""
    file = store._view.find(store._path(key))
    return file is not None and store.get(key, max_bytes=100) == data


def test_changes_arrive_by_the_feed_and_cost_the_hub_nothing(hub, writer, replica):
    writer.put("before", b"1")
    follow(replica)
    writer.put("HEAD.json", b"v1")
    until(lambda: sees(replica, "HEAD.json", b"v1"))
    writer.put("HEAD.json", b"v2")
    until(lambda: sees(replica, "HEAD.json", b"v2"))
    writer.delete("before")
    until(lambda: [info.key for info in replica.list("")] == ["HEAD.json"])
    hub.forget()
    for _ in range(50):
        assert replica.get("HEAD.json", max_bytes=9) == b"v2"
        replica.info("HEAD.json")
    assert hub.counts()["api"] == hub.counts()["resolver"] == 0
    assert hub.counts()["cas"] <= 4  # the second download is believed; from then on memory answers


def test_a_lost_event_is_made_good_by_the_next_listing(hub, writer, replica, hub_bucket, monkeypatch):
    monkeypatch.setattr(hub_view, "RECONCILE_SECONDS", 1.0)
    monkeypatch.setattr(hub_view, "TRUSTED_SECONDS", 0.5)
    follow(replica)
    files = hub.api.buckets[hub_bucket].files
    writer.put("a", b"1")
    until(lambda: sees(replica, "a", b"1"))
    files["run/lost"] = replace(files.pop("run/a"), path="run/lost")  # behind the feed's back
    until(lambda: [info.key for info in replica.list("")] == ["lost"])


def test_a_stale_listing_does_not_undo_what_the_feed_said(hub, writer, replica, monkeypatch):
    monkeypatch.setattr(hub_view, "RECONCILE_SECONDS", 0.5)
    follow(replica)
    hub.faults.add("stale", "/tree", seconds=20)
    writer.put("new", b"1")
    until(lambda: sees(replica, "new", b"1"))
    hub.forget()
    until(lambda: hub.counts()["api"] >= 3)  # listings that do not have it yet
    assert [info.key for info in replica.list("")] == ["new"]
    assert replica.get("new", max_bytes=1) == b"1"


def test_a_dropped_feed_is_taken_up_where_it_was(hub, writer, replica):
    follow(replica)
    writer.put("a", b"1")
    until(lambda: sees(replica, "a", b"1"))
    hub.forget()
    hub.drop_feeds()
    writer.put("b", b"2")
    until(lambda: sees(replica, "b", b"2"))
    assert any(request.query.get("cursor") for request in hub.requests if request.path.endswith("/events"))
    assert not any("tree" in line for _, line in hub.asked)  # resumed, not listed


def test_a_cursor_too_old_means_listing_again(hub, writer, replica, hub_bucket):
    follow(replica)
    writer.put("a", b"1")
    until(lambda: sees(replica, "a", b"1"))
    hub.api.serves_events = False  # long enough to miss more than the Hub replays
    hub.drop_feeds()
    writer.put("b", b"2")
    hub.api.buckets[hub_bucket].forgotten = 10**6
    hub.forget()
    replica._view._feed_refused = -1e9
    hub.api.serves_events = True
    until(lambda: sees(replica, "b", b"2"), 30)


def test_without_a_feed_the_folder_is_listed_now_and_then(hub, writer, replica, monkeypatch):
    monkeypatch.setattr(hub_view, "POLL_SECONDS", 0.5)
    hub.api.serves_events = False
    follow(replica)
    writer.put("a", b"1")
    until(lambda: sees(replica, "a", b"1"))
    hub.forget()
    time.sleep(2.0)
    assert 1 <= hub.counts()["api"] <= 8
    assert hub.counts()["events"] == 0


def test_a_hub_that_is_gone_is_asked_again_and_nothing_old_is_served_for_long(hub, writer, replica, monkeypatch):
    monkeypatch.setattr(hub_view, "STALE_SECONDS", 1.0)
    follow(replica)
    writer.put("a", b"1")
    until(lambda: sees(replica, "a", b"1"))
    hub.faults.add("status", "events|tree", status=503)
    hub.drop_feeds()
    until(lambda: not replica._view.answers)
    writer.put("a", b"2")
    assert replica.get("a", max_bytes=1) == b"2"  # asked of the Hub itself
    hub.faults.clear()
    until(lambda: replica._view.answers, 30)


def test_a_view_that_does_not_answer_is_no_reason_to_ask_ten_times_a_second(hub, writer, replica):
    writer.put("a", b"1")
    hub.faults.add("status", "events|tree", status=503)
    replica.follow()
    hub.forget()
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        assert replica.get("a", max_bytes=1) == b"1"
        time.sleep(0.02)
    assert hub.counts()["resolver"] <= 2
    replica.put("a", b"2")
    assert replica.get("a", max_bytes=1) == b"2"  # what it wrote itself it sees at once


def test_what_the_feed_may_say_is_taken_or_left(hub, writer, replica, hub_bucket):
    """Directed ends, unknown events, nonsense: the next connection goes on after the last cursor."""
    follow(replica)
    view = replica._view
    added = '{"path": "run/a", "op": "add", "size": 3, "xetHash": "ab"}'
    lines = [
        "event: changes", 'data: {"cursor": "7", "changes": [1, {"path": "run/a",', "",
        "event: changes", f'data: {{"cursor": "7", "changes": [1, {{}}, {added}]}}', "",
        "event: changes", 'data: {"cursor": "8", "changes": [{"path": "run/a", "op": "update", "xetHash": "cd"}]}', "",
        "event: changes", f'data: {{"cursor": "9", "changes": [{added.replace("run/a", "elsewhere")}]}}', "",
        ": ping", "", "event: new-kind", "data: {}", "", "event: reconnect", 'data: {"cursor": "12"}', "",
        "event: changes", 'data: {"cursor": "13", "changes": [{"path": "run/a", "op": "delete"}]}', "",
    ]  # fmt: skip
    assert view._listen(hub_view._events(iter(lines)))
    assert view.find("run/a") == XetFile("cd", 3)
    assert view.find("elsewhere") is None
    assert view._cursor == "12"


def test_a_feed_whose_line_never_ends_is_left(hub, writer, replica, hub_bucket):
    """And a listing is due soon, as something may have been missed."""
    follow(replica)
    view = replica._view
    view._next_listing = before = time.monotonic() + 1e6
    endless = hub_view.event_lines(repeat(b"x" * 100), limit=1000)
    assert not view._listen(hub_view._events(endless))
    assert view._next_listing < before


def test_an_event_without_end_is_not_collected(monkeypatch):
    monkeypatch.setattr(hub_view, "EVENT_CHARACTERS", 100)
    lines = chain(["event: changes"], repeat(f"data: {'x' * 40}"))
    with pytest.raises(httpx2.ReadError, match="more than 100 characters"):
        next(hub_view._events(lines))
