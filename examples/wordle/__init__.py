"""Wordle by GRPO: an environment server, a trainer script, and a demo of both beside a live vLLM server."""
