"""The Wordle environment server on port 7860, behind a key: the secret WORDLE_ENV_TOKEN.

Variable, if wanted: MAX_CONCURRENT_ENVS, the number of games that may be open at once.
"""

from __future__ import annotations

import os
import sys

PORT = 7860


def main() -> None:
    """Serve until ended."""
    token = os.environ.get("WORDLE_ENV_TOKEN", "").strip()
    if not token:
        sys.exit(
            "wordle-space: expected in the environment, got nothing: WORDLE_ENV_TOKEN (the key that every client "
            "must send, as a secret). Remedy: the Space's settings"
        )
    import uvicorn
    from guard import Guard

    from examples.wordle.env_server import create_app, sessions_from_environment

    app = Guard(create_app(sessions_from_environment()), keys=[token])
    uvicorn.run(app, host="0.0.0.0", port=PORT, log_level="warning")


if __name__ == "__main__":
    main()
