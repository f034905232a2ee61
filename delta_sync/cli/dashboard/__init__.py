"""``delta-sync ui``: one local page about a run, read only; see docs/DASHBOARD.md."""
