"""A process that holds namespaces and a root, in which commands run until it ends."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from helpers.container.dockerfile import Dockerfile, Step

READY = "ready"
PIP_OFFLINE = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
SYSTEM = ("/usr", "/etc", "/sys", "/dev", "/proc")  # of this machine; what these hold is not changed
TOOLS = ("unshare", "nsenter", "chroot", "mount", "ip")

PROBE = (
    "mount -t tmpfs t /mnt && mkdir /mnt/u /mnt/w &&"
    " mount -t overlay o -o lowerdir=/usr/bin,upperdir=/mnt/u,workdir=/mnt/w /mnt/u"
)


class ContainerFailed(RuntimeError):
    """A step of the image, or the setting up of its root, failed; the message has its output."""


def why_not() -> str | None:
    """Why no container can be made here; None where one can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs root on Linux: namespaces, another user and a root of its own"
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"needs {', '.join(missing)}"
    done = subprocess.run(
        ["unshare", "--mount", "--net", "sh", "-c", PROBE], capture_output=True, text=True, check=False
    )
    return None if done.returncode == 0 else f"may not mount here: {done.stderr.strip()}"


class Container:
    """A root under ``folder``, built from ``context`` by its Dockerfile; its network is loopback until joined."""

    def __init__(
        self, folder: Path, context: Path, *, binds: Mapping[str, Path] | None = None, user: str | None = None
    ) -> None:
        self.root, self._context, self._binds = folder / "root", context, dict(binds or {})
        self.image = Dockerfile.read(context / "Dockerfile")
        self.user = user or self.image.user
        self._holder: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        self.root.mkdir(parents=True)
        try:
            self._hold()
            for step in self.image.steps:
                self._copy(step) if step.word == "COPY" else self._run(step)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the holder: its mounts and its network go with it. What runs inside is the caller's to end before."""
        if self._holder is not None:
            self._holder.kill()
            self._holder.wait()
            if self._holder.stdout:
                self._holder.stdout.close()
            self._holder = None

    @property
    def pid(self) -> int:
        """The process whose namespaces these are."""
        if self._holder is None:
            raise ContainerFailed("expected a container that is open, got one that is not")
        return self._holder.pid

    def command(self, env: Mapping[str, str], words: Sequence[str] = ()) -> list[str]:
        """What starts ``words``, or the image's entrypoint, inside: as its user, with its ENV and ``env`` alone."""
        return self._inside(self.user, self.image.workdir, {**self.image.env, **env}, words or self.image.entrypoint)

    def _inside(self, user: str, workdir: str, env: Mapping[str, str], words: Sequence[str]) -> list[str]:
        enter = ["nsenter", "--target", str(self.pid), "--mount", "--net", "chroot", f"--userspec={user}:{user}"]
        enter += ["--groups=", str(self.root), "env", "-i", f"--chdir={workdir}"]
        return [*enter, *(f"{name}={value}" for name, value in {"PATH": _path(), **env}.items()), *words]

    def join(self, bridge: str, address: str) -> None:
        """Plug into a bridge of the caller's network, as ``address`` (with its prefix length)."""
        name = f"v{self.pid}"
        _check(["ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", str(self.pid)])
        _check(["ip", "link", "set", name, "master", bridge, "up"])
        inside = ["nsenter", "--target", str(self.pid), "--net", "ip"]
        _check([*inside, "addr", "add", address, "dev", "eth0"])
        _check([*inside, "link", "set", "eth0", "up"])

    def forbid_writing(self, path: str) -> None:
        """Make a folder of the root read-only."""
        place = str(self.root) + path
        script = (
            f"mount --bind {shlex.quote(place)} {shlex.quote(place)}; mount -o remount,bind,ro {shlex.quote(place)}"
        )
        _check(["nsenter", "--target", str(self.pid), "--mount", "sh", "-ec", script])

    def _hold(self) -> None:
        script = "\n".join(["ip link set lo up", *self._mounts(), f"echo {READY}", "exec sleep infinity"])
        command = ["unshare", "--mount", "--net", "sh", "-ec", script]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self._holder = subprocess.Popen(command, start_new_session=True, **pipes)  # type: ignore[call-overload]
        assert self._holder.stdout is not None
        said = []
        while (line := self._holder.stdout.readline()) and line.strip() != READY:
            said.append(line)
        if not line:
            raise ContainerFailed(f"the root could not be set up: {''.join(said)}")

    def _mounts(self) -> list[str]:
        root = shlex.quote(str(self.root))
        lines = [
            f"mount -t tmpfs -o mode=755 tmpfs {root}",
            f"mkdir -p {root}/.writes {root}/tmp",
            f"chmod 1777 {root}/tmp",
        ]
        for link in ("/bin", "/sbin", "/lib", "/lib64"):
            if Path(link).is_symlink():
                lines.append(f"ln -s {os.readlink(link)} {root}{link}")  # noqa: PTH115  # relative, as it stands
            elif Path(link).exists():
                lines += self._bind(Path(link), link)
        for place in SYSTEM:
            lines += self._bind(Path(place), place, recursive=place not in ("/usr", "/etc"))
        for number, place in enumerate(_python_folders()):
            lines += self._copied_on_write(place, number)
        for inside, outside in self._binds.items():
            lines += self._bind(outside, inside)
        return lines

    def _bind(self, outside: Path, inside: str, recursive: bool = False) -> list[str]:
        place = shlex.quote(str(self.root) + inside)
        lines = [f"mkdir -p {place}", f"mount --{'r' if recursive else ''}bind {shlex.quote(str(outside))} {place}"]
        return lines if recursive else [*lines, f"mount -o remount,bind,ro {place}"]

    def _copied_on_write(self, place: Path, number: int) -> list[str]:
        """The same files at the same path, where steps may install; nothing of it reaches this machine's."""
        writes, inside = f"{self.root}/.writes/{number}", shlex.quote(f"{self.root}{place}")
        options = shlex.quote(f"lowerdir={place},upperdir={writes}/up,workdir={writes}/work")
        return [
            f"mkdir -p {shlex.quote(writes)}/up {shlex.quote(writes)}/work {inside}",
            f"mount -t overlay overlay -o {options} {inside}",
        ]

    def _copy(self, step: Step) -> None:
        *sources, target = shlex.split(step.rest)
        for source in sources:
            name = self._context / source
            place = f"{self.root}{target}{name.name if target.endswith('/') else ''}"
            words = ["sh", "-ec", 'mkdir -p "$(dirname "$2")" && cp -R "$1" "$2"', "copy", str(name), place]
            _check(["nsenter", "--target", str(self.pid), "--mount", *words])

    def _run(self, step: Step) -> None:
        _check(self._inside("0", step.workdir, {**step.env, **PIP_OFFLINE}, ["sh", "-ec", step.rest]))


def _python_folders() -> list[Path]:
    """Where this Python and all that it can import lie, the checkout itself left out; none inside another."""
    checkout = Path(__file__).resolve().parents[3]
    paths = {Path(sys.prefix), Path(sys.base_prefix), *(Path(p) for p in sys.path if "site-packages" in p)}
    paths = {path.resolve() for path in paths if path.is_dir() and path.resolve() != checkout}
    return sorted(p for p in paths if not any(p.is_relative_to(q) for q in [*(paths - {p}), Path("/usr")]))


def _path() -> str:
    return f"{sysconfig.get_path('scripts')}:/usr/local/bin:/usr/bin:/bin"


def _check(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, timeout=300)
    if done.returncode != 0:
        with contextlib.suppress(ValueError):
            command = command[command.index("env") :]
        raise ContainerFailed(
            f"{shlex.join(command)[:500]}: exit code {done.returncode}\n{(done.stdout + done.stderr)[-3000:]}"
        )
