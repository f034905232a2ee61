"""The bucket between trainer and rollouts: private, and deleted only as far as this example filled it."""

from __future__ import annotations

from huggingface_hub import BucketFile, HfApi
from huggingface_hub.errors import BucketNotFoundError

from examples.wordle.space_repo import SpacesFailed

NAMED = 3  # other things that a message names


def make_private_bucket(api: HfApi, bucket: str) -> None:
    """Make the bucket, or take the one that is there if nobody but its owners can read it."""
    api.create_bucket(bucket, private=True, exist_ok=True)  # what is there is left as it is, public too
    if not api.bucket_info(bucket).private:
        raise SpacesFailed(
            f"bucket {bucket}: expected a private one, got a public one: anybody could read the weights. "
            "Remedy: make it private in its settings, or another --name"
        )


def delete_run(api: HfApi, bucket: str, run: str) -> str:
    """Delete the bucket, or the run alone where the bucket holds anything else; returns which."""
    try:
        paths = [entry.path for entry in api.list_bucket_tree(bucket, recursive=True) if isinstance(entry, BucketFile)]
    except BucketNotFoundError:
        return f"{bucket}: gone"
    own = [path for path in paths if path.startswith(f"{run}/")]
    others = sorted({path.partition("/")[0] for path in set(paths) - set(own)})
    if not others:
        api.delete_bucket(bucket, missing_ok=True)
        return f"{bucket}: gone"
    api.batch_bucket_files(bucket, delete=own)
    named = ", ".join(others[:NAMED]) + (" and more" if len(others) > NAMED else "")
    return (
        f"{bucket}: {len(own)} objects of {run} are gone; the bucket is kept, as it holds {named} too "
        f"(another run: --teardown --run NAME; everything: hf buckets delete {bucket})"
    )
