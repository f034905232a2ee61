from __future__ import annotations

import json
import time

import pytest
from helpers.publish import Publisher, read_checkpoint

from delta_sync.anchor_files import INDEX, iter_anchor_tensors, write_anchor_files, write_shard
from delta_sync.cli.run import open_ledger
from delta_sync.cli.timed_store import TimedStore
from delta_sync.errors import IntegrityError, StoreError


def test_a_whole_run_is_proven(run, as_json):
    code, found = as_json("verify", run.uri)
    assert (code, found["damage"], found["proven"]) == (0, [], [1, 2, 3, 4, 5, 6])


def test_a_young_run_without_an_anchor_is_said_to_be_just_that(tmp_path, run, cli):
    young = Publisher(str(tmp_path / "young"), run.publisher.weights)
    young.origin()
    young.step(1)
    code, out, _ = cli("verify", str(tmp_path / "young"))
    assert code == 0
    assert "the others have no anchor (complete weights) below them, which --base CKPT can stand in for: only" in out


def test_a_young_run_is_proven_from_the_model_that_it_began_with(tmp_path, run, cli, as_json):
    uri = str(tmp_path / "young")
    young = Publisher(uri, run.publisher.weights)
    (tmp_path / "empty").mkdir()
    base = young.save(tmp_path / "base", tmp_path / "empty")
    young.origin()
    young.step(1)
    code, found = as_json("verify", uri, "--base", base)
    assert (code, found["proven"]) == (0, [1, 2])
    young.step(2, corrupt="content")
    code, found = as_json("verify", uri, "--base", base)
    assert (code, found["proven"], [d["version"] for d in found["damage"]]) == (1, [1, 2], [3])
    young.change(3, 0.5)
    other = young.save(tmp_path / "other", tmp_path / "empty")
    code, _, err = cli("verify", uri, "--base", other)
    assert code == 1
    assert "which none has" in err


def test_the_model_that_it_began_with_may_repeat_its_embedding_as_a_head(tmp_path, run, cli, as_json):
    """As some models' files do: such a head is no tensor of the run, and servers that hold it serve the run."""
    weights, uri = run.publisher.weights, str(tmp_path / "young")
    (tmp_path / "empty").mkdir()
    repeated = Publisher(str(tmp_path / "other"), weights | {"lm_head.weight": weights["embed.weight"]})
    base = repeated.save(tmp_path / "base", tmp_path / "empty")
    young = Publisher(uri, weights)
    young.origin()
    young.step(1)
    code, found = as_json("verify", uri, "--base", base)
    assert (code, found["proven"]) == (0, [1, 2])
    code, _, err = cli("materialize", uri, tmp_path / "two", "--base", base)
    assert code == 0
    assert "1 tensor left out that the run has not, as 'lm_head.weight'" in err
    assert read_checkpoint(tmp_path / "two")[0].keys() == weights.keys()
    repeated.change(3, 0.5)
    code, _, err = cli("verify", uri, "--base", repeated.save(tmp_path / "changed", tmp_path / "empty"))
    assert code == 1
    assert "which none has" in err


def test_all_damage_is_named_at_once_with_what_to_do(run, as_json, cli):
    second, third = run.manifests[2].objects[0].key, run.manifests[3].objects[0].key
    shard = "anchors/000000000001-000001/model.safetensors"
    run.damage(second)
    (run.folder / third).unlink()
    run.damage(shard)
    code, found = as_json("verify", run.uri)
    assert code == 1
    assert [d["object"] for d in found["damage"]] == [shard, second, third]
    assert found["proven"] == [4, 5, 6]  # the second anchor leads past it
    assert all(d["remedy"] for d in found["damage"])
    code, out, _ = cli("verify", run.uri)
    assert code == 1
    assert second in out


def test_content_that_was_not_published_is_found_under_right_hashes(run, as_json):
    wrong = run.publisher.step(9, corrupt="content")
    code, found = as_json("verify", run.uri)
    assert (code, found["proven"]) == (1, [1, 2, 3, 4, 5, 6])
    assert [d["version"] for d in found["damage"]] == [wrong.version]
    assert "digest of" in found["damage"][0]["problem"]


def test_an_anchor_with_other_weights_is_found(run, as_json):
    run.publisher.anchor(run.manifests[6])
    run.damage("anchors/000000000006-000001/model.safetensors")
    code, found = as_json("verify", run.uri)
    assert (code, found["proven"]) == (1, [1, 2, 3, 4, 5, 6])
    assert [d["object"] for d in found["damage"]] == ["anchors/000000000006-000001/model.safetensors"]


def test_a_damaged_anchor_keeps_no_later_version_from_being_proven(run, as_json):
    run.damage("anchors/000000000004-000001/model.safetensors")
    code, found = as_json("verify", run.uri)
    assert (code, found["proven"]) == (1, [1, 2, 3, 4, 5, 6])
    assert [d["object"] for d in found["damage"]] == ["anchors/000000000004-000001/model.safetensors"]


def misplaced(folder, run, how):
    """The newest weights in two files and their index, of which one says something else of ``embed.weight``."""
    names, publisher = sorted(run.publisher.weights), run.publisher
    tensors = [(n, publisher.dtype(n), publisher.weights[n].shape, publisher.weights[n].reshape(-1)) for n in names]
    files = write_anchor_files(folder, tensors, shard_bytes=(96 + 64) * 64 * 2)
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    index = json.loads(files[INDEX].read_text())
    places = index["weight_map"]
    assert places == {"embed.weight": first, "layer.weight": first, "norm.weight": second}
    if how == "in two files":  # and those of the first, which readers come upon first, are others
        write_shard(files[first], [(*tensors[0][:3], tensors[0][3] ^ 1), tensors[1]])
        write_shard(files[second], [tensors[0], tensors[2]])
        places["embed.weight"] = second
    elif how == "in two files without an index":
        write_shard(files[second], [tensors[0], tensors[2]])
        del files[INDEX]
        return files
    elif how == "the index names another file":
        places["embed.weight"] = second
    else:
        del places["embed.weight"]
    files[INDEX].write_text(json.dumps(index))
    return files


@pytest.mark.parametrize(
    "how",
    ["in two files", "in two files without an index", "the index names another file", "the index does not name it"],
)
def test_an_anchor_whose_tensors_are_not_where_its_index_says_is_found(run, as_json, tmp_path, how):
    """A rank that wants this tensor alone finds it in another file than the rest, or in none."""
    record = run.publisher.anchor(run.manifests[6], misplaced(tmp_path / "files", run, how))
    code, found = as_json("verify", run.uri)
    assert (code, found["proven"]) == (1, [1, 2, 3, 4, 5, 6])
    assert all(d["object"].startswith("anchors/000000000006-000001/model-0000") for d in found["damage"])
    assert len(found["damage"]) == 1 and "embed.weight" in found["damage"][0]["problem"]
    with pytest.raises(IntegrityError, match=r"embed\.weight"):
        list(iter_anchor_tensors(open_ledger(run.uri), record))


def test_the_files_of_a_whole_anchor_with_an_index_are_counted_once(run, as_json, tmp_path):
    before = as_json("verify", run.uri)[1]["objects"]
    publisher = run.publisher
    tensors = ((n, publisher.dtype(n), bits.shape, bits.reshape(-1)) for n, bits in publisher.weights.items())
    files = write_anchor_files(tmp_path / "files", tensors, shard_bytes=1)
    publisher.anchor(run.manifests[6], {**files, "config.json": b"{}"})
    code, found = as_json("verify", run.uri)
    assert (code, found["damage"], found["objects"] - before) == (0, [], 5)
    run.damage("anchors/000000000006-000001/model.safetensors.index.json")
    code, found = as_json("verify", run.uri)
    assert [d["object"] for d in found["damage"]] == ["anchors/000000000006-000001/model.safetensors.index.json"]


def test_old_versions_that_are_gone_are_no_damage_while_an_anchor_is_left(run, as_json):
    for version in (1, 2):
        (run.folder / run.manifests[version].key).unlink()
    code, found = as_json("verify", run.uri)
    assert (code, found["oldest"], found["proven"]) == (0, 3, [4, 5, 6])
    (run.folder / "anchors/000000000004-000001/anchor.json").unlink()
    code, found = as_json("verify", run.uri)
    assert code == 1
    assert "version 2" in found["damage"][0]["object"]


@pytest.mark.parametrize("key", ["anchors/000000000004-000001/anchor.json", "manifest of 3"])
def test_damaged_descriptions(run, as_json, key):
    run.damage(run.manifests[3].key if key == "manifest of 3" else key)
    code, found = as_json("verify", run.uri)
    assert code == 1
    assert len(found["damage"]) == 1


@pytest.mark.parametrize("key", ["HEAD.json", "newest manifest"])
def test_a_damaged_newest_version_is_named_and_the_rest_still_checked(run, as_json, key):
    other = run.manifests[5].objects[0].key
    run.damage(other)
    if key == "HEAD.json":  # damage that JSON does not show: another hash
        head = (run.folder / key).read_text()
        (run.folder / key).write_text(head.replace(run.manifests[6].sha256, "0" * 64))
    else:
        run.damage(run.manifests[6].key)
    code, found = as_json("verify", run.uri)
    assert code == 1
    assert [d["object"] for d in found["damage"]] == ["newest manifest or HEAD.json", other]
    assert found["newest"] == (6 if key == "HEAD.json" else 5)
    assert as_json("ledger", run.uri)[0] == 1


def test_a_second_epoch_is_followed(run, as_json):
    later = Publisher(run.uri, run.publisher.weights)
    later.origin()
    later.step(20)
    code, found = as_json("verify", run.uri)
    assert (code, found["proven"]) == (0, [1, 2, 3, 4, 5, 6, 7, 8])


def unreadable(run, key):
    """A link: the store refuses to follow it, each time it is asked."""
    path = run.folder / key
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))


def test_what_cannot_be_read_is_named_and_the_rest_still_checked(run, as_json, cli):
    keys = [run.manifests[version].objects[0].key for version in (2, 3)]
    for key in (*keys, "anchors/000000000004-000001/model.safetensors"):
        unreadable(run, key)
    code, found = as_json("verify", run.uri)
    assert (code, found["damage"], found["proven"]) == (3, [], [1])
    assert [u["object"] for u in found["unread"]] == [*keys, "anchors/000000000004-000001/model.safetensors"]
    assert all(u["remedy"] and "without symbolic links" in u["problem"] for u in found["unread"])
    damaged = run.manifests[5].objects[0].key
    run.damage(damaged)
    code, found = as_json("verify", run.uri)
    assert (code, [d["object"] for d in found["damage"]], len(found["unread"])) == (1, [damaged], 3)
    code, out, _ = cli("verify", run.uri)
    assert "could not be read" in out and "damage" in out and "no damage found" not in out


def test_a_manifest_that_cannot_be_read_ends_the_chain_and_not_the_walk(run, as_json):
    unreadable(run, run.manifests[3].key)
    code, found = as_json("verify", run.uri)
    assert (code, found["oldest"], found["proven"]) == (3, 4, [4, 5, 6])
    assert [u["object"] for u in found["unread"]] == ["manifest of version 3"]
    unreadable(run, "HEAD.json")
    code, found = as_json("verify", run.uri)
    assert (code, found["newest"], len(found["unread"])) == (3, 6, 2)


def test_a_store_that_only_fails_is_asked_no_more(run, monkeypatch):
    """Its every call may last minutes; a long run has thousands of objects."""
    store = TimedStore(run.uri, patience=0.05)
    calls = []

    def fail(key, max_bytes):
        calls.append(key)
        time.sleep(0.03)
        raise StoreError("down")

    monkeypatch.setattr(store.inner, "get", fail)
    for _ in range(9):
        with pytest.raises(StoreError):
            store.get("HEAD.json", max_bytes=9)
    assert len(calls) == 2
    monkeypatch.undo()
    with pytest.raises(StoreError, match="none was waited for"):
        store.get("HEAD.json", max_bytes=9)
