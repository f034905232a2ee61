"""``python -m delta_sync.cli``: the same as ``delta-sync``."""

from delta_sync.cli import main

main()
