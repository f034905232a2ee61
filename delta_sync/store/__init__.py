"""delta_sync/store."""
