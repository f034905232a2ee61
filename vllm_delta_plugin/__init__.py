"""vllm_delta_plugin."""
