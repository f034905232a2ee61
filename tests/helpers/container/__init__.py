"""What a Dockerfile's steps come to, without a Docker engine: a root of its own, a network of its own, another user.

The base image is this machine's /usr and the virtualenv in use, copied on write; every other step is carried out as
the Dockerfile says. So it shows that our steps and entrypoints work, not that the base images are what they say.
"""

from helpers.container.container import Container, ContainerFailed, why_not
from helpers.container.dockerfile import Dockerfile

__all__ = ["Container", "ContainerFailed", "Dockerfile", "why_not"]
