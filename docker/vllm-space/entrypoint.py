"""Become `vllm serve --delta-sync` on port 7860, with everything that is secret taken from the environment.

Variables: MODEL, DELTA_SYNC_URI and, if wanted, SERVE_ARGS (more arguments of `vllm serve`, quoted as in a shell).
Secrets: VLLM_API_KEY, and HF_TOKEN for an hf:// bucket or a model that is not public.
"""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from guard import KEYS, unusable

PORT = "7860"
REQUIRED = {
    "MODEL": "the Hub name of the model that the trainer starts from, as a variable",
    "DELTA_SYNC_URI": "the run's bucket, hf://buckets/OWNER/NAME/RUN, as a variable",
    "VLLM_API_KEY": "the key that every client must send, as a secret",
}
CACHES = (
    "HF_HOME",
    "XDG_CACHE_HOME",
    "VLLM_CACHE_ROOT",
    "VLLM_CONFIG_ROOT",
    "TORCH_HOME",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "FLASHINFER_WORKSPACE_BASE",
    "NUMBA_CACHE_DIR",
)


def problem(env: Mapping[str, str]) -> str | None:
    """What keeps the server from starting, all of it in one sentence; None if nothing does."""
    needed = dict(REQUIRED)
    if env.get("DELTA_SYNC_URI", "").startswith("hf://"):
        needed["HF_TOKEN"] = "a token that may read the bucket, and write to it to acknowledge, as a secret"
    missing = [f"{name} ({what})" for name, what in needed.items() if not env.get(name, "").strip()]
    if missing:
        return f"expected in the environment, got nothing: {'; '.join(missing)}. Remedy: the Space's settings"
    for name in (*KEYS, "HF_TOKEN"):  # each goes into a header
        if trouble := unusable(env.get(name, "")):
            return f"{name}: {trouble}"
    if env.get("VLLM_SERVER_DEV_MODE", "0") not in ("", "0"):
        return (
            "VLLM_SERVER_DEV_MODE: expected unset, got it set: its routes let anybody run code here. Remedy: delete it"
        )
    return None


def writable_caches(env: Mapping[str, str]) -> dict[str, str]:
    """HOME and a folder below it for every cache; a fresh HOME where the given one can't be written."""
    home = Path(env.get("HOME") or "/")
    if not os.access(home, os.W_OK):
        home = Path(tempfile.mkdtemp(prefix="home-"))
    below = {name: str(home / ".cache" / name.lower()) for name in CACHES if not env.get(name)}
    return {"HOME": str(home), "USER": env.get("USER") or "user", **below}


def command(env: Mapping[str, str]) -> list[str]:
    """The server's command line; no secret is in it, as every process of the machine may read it."""
    serve = ["vllm", "serve", env["MODEL"], "--delta-sync", env["DELTA_SYNC_URI"], "--dtype", "bfloat16"]
    serve += ["--host", "0.0.0.0", "--port", PORT, "--middleware", "guard.Guard"]
    return serve + shlex.split(env.get("SERVE_ARGS", ""))


def main() -> None:
    """Check, prepare, and give the process over to the server, so that signals reach it."""
    if trouble := problem(os.environ):
        sys.exit(f"vllm-space: {trouble}")
    os.environ.update(writable_caches(os.environ))
    serve = command(os.environ)
    print(f"vllm-space: {shlex.join(serve)}", flush=True)
    os.execvp(serve[0], serve)


if __name__ == "__main__":
    main()
