"""A small Hub for tests: the bucket API, the Xet storage behind it, and a stand-in for Spaces, as clients use them.

It is written from what the clients send and expect, so it shows how they behave, not what huggingface.co does.
"""

from helpers.hub.server import TestHub

__all__ = ["TestHub"]
