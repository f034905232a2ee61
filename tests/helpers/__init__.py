"""Shared by tests of several areas: tiny models, a server process, a stand-in trainer, streaming clients."""
