"""The Wordle environment server on port 7860, behind a key: the secret WORDLE_ENV_TOKEN.

Variable, if wanted: MAX_CONCURRENT_ENVS, the number of games that may be open at once.
"""

from __future__ import annotations

import os
import sys

from guard import Guard, unusable

PORT = 7860


def main() -> None:
    """Serve until ended."""
    token = os.environ.get("WORDLE_ENV_TOKEN", "")
    if not token.strip():
        sys.exit(
            "wordle-space: expected in the environment, got nothing: WORDLE_ENV_TOKEN (the key that every client "
            "must send, as a secret). Remedy: the Space's settings"
        )
    if trouble := unusable(token):
        sys.exit(f"wordle-space: WORDLE_ENV_TOKEN: {trouble}")
    import uvicorn

    from examples.wordle.env_server import create_app, sessions_from_environment

    app = Guard(create_app(sessions_from_environment()), keys=[token])
    uvicorn.run(app, host="0.0.0.0", port=PORT, log_level="warning")


if __name__ == "__main__":
    main()
