"""A small Hub for tests: the bucket API and the Xet storage behind it, as far as the unmodified clients use them.

It is written from what the clients send and expect, so it shows how they behave, not what huggingface.co does.
"""

from helpers.hub.server import TestHub

__all__ = ["TestHub"]
