"""trl_callback."""
