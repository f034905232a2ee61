"""delta_sync."""
