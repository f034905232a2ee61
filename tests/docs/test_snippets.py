"""The documentation's code blocks run: here what takes seconds, by `make test-long` what needs TRL or a server.

A block that can't run says why, `<!-- not run: reason -->`. Here `vllm serve` lines go through vLLM's own parser,
requests are held against the plugin's routes, and scripts that train are compiled and their settings looked up.
"""

from __future__ import annotations

import ast
import re
import runpy
import sys
from dataclasses import fields
from urllib.parse import urlsplit

import huggingface_hub.constants
import pytest
import shell_block
import world as worlds
from blocks import ROOT, RUN, SHOWN, TRAINS, Block, blocks, of
from shell_block import Command, commands_of
from tallies import tally

import trl_callback
from delta_sync.store.open import open_store
from trl_callback.config import DeltaSyncConfig

sys.path.append(str(ROOT / "scripts" / "site"))
import server_reference

ALL = blocks()
SERVED = {"/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/metrics"}
COMMANDS = re.compile(r"^\s*(\$ |pip install|vllm serve|delta-sync |make |curl |from \w+ import)", re.MULTILINE)
LOOKS = re.compile(r"^(\$ )?delta-sync ", re.MULTILINE)


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """A finished run of a tiny model."""
    from helpers.tiny_models import build

    folder = tmp_path_factory.mktemp("docs")
    worlds.make_run(folder / "run", build(folder / "tiny"))
    return folder / "run"


@pytest.fixture
def world(request, run, tmp_path):
    """A copy of the run for each block; damaged, or in a bucket, where the block needs it."""
    block: Block = request.getfixturevalue("block")
    here = worlds.local(tmp_path, run)
    if block.world is not None:
        worlds.WORLDS[block.world](here)
    if "s3://bucket/run" in block.code:
        request.getfixturevalue("proxy")  # sets the environment
        uri = f"s3://{request.getfixturevalue('bucket')}/run"
        here.names["s3://bucket/run"] = uri
        store = open_store(uri)
        for path in sorted(p for p in run.rglob("*") if p.is_file()):
            store.put_file(path.relative_to(run).as_posix(), path)
    return here


def test_every_block_says_what_it_is():
    unknown = [f"{b}: {b.language or 'no language'}" for b in ALL if b.language not in RUN + SHOWN]
    assert not unknown, f"begin a fence with one of {RUN + SHOWN}"
    hidden = [f"{b}: {m[0]}" for b in ALL if b.language == "text" and (m := COMMANDS.search(b.code))]
    assert not hidden, "commands in a block that is only shown"
    for block in ALL:
        assert block.not_run is None or len(block.not_run) > 10, f"{block}: a reason, please"
        if block.language in RUN and block.not_run is not None:
            tally("not run", f"{block}: {block.not_run}")
    assert sum(b.language in RUN for b in ALL) > 30, "the blocks are not found any more"


@of("bash", "console")
def test_shell(block, world, request, monkeypatch):
    code = world.real(block.code)
    commands = commands_of(code) if block.language == "console" else [Command(code, [])]
    outcome = shell_block.run(commands, world.folder, {}, recorded=("vllm", "curl"))
    if not (outcome.calls and block.language == "console"):  # what only a server says is not there to be compared
        shell_block.check(commands, outcome)
    monkeypatch.chdir(world.folder)
    for program, *arguments in outcome.calls:
        if program == "vllm":
            check_serve(request.getfixturevalue("serve_parser"), arguments, monkeypatch)
        else:
            check_request(arguments)
    tally("parsed only" if outcome.calls and not LOOKS.search(code) else "run", str(block))


@of("python", where=lambda b: not TRAINS.search(b.code))
def test_python(block, world, monkeypatch):
    script = world.folder / "snippet.py"
    script.write_text(world.real(block.code))
    monkeypatch.chdir(world.folder)
    runpy.run_path(str(script), run_name="__main__")  # here, as torch takes seconds to be imported
    tally("run", str(block))


@of("python", where=lambda b: TRAINS.search(b.code))
def test_training_scripts_are_spelled_right(block):
    settings = {field.name for field in fields(DeltaSyncConfig)}
    for node in ast.walk(ast.parse(block.code, str(block))):
        if isinstance(node, ast.ImportFrom) and node.module == "trl_callback":
            assert {alias.name for alias in node.names} <= set(trl_callback.__all__)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("DeltaSyncCallback", "attach"):
            assert {keyword.arg for keyword in node.keywords} <= settings, block
    tally("parsed only", str(block))


@pytest.fixture(scope="session")
def serve_parser():
    """The parser of the real ``vllm`` command, with the plugin's flags."""
    pytest.importorskip("vllm")
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from vllm_delta_plugin import register

    register()
    parser = FlexibleArgumentParser()
    serve = ServeSubcommand()
    serve.subparser_init(parser.add_subparsers(dest="subparser")).set_defaults(validate=serve.validate)
    return parser


def check_serve(parser, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM takes the line, and makes engine arguments of it that follow a run."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    for name in ("VLLM_PLUGINS", "DELTA_SYNC_CONFIG"):
        monkeypatch.setenv(name, "")  # so that what the flag sets is undone
        monkeypatch.delenv(name)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)  # other tests' files may have set it
    args = parser.parse_args(arguments)
    args.validate(args)
    args.model = args.model_tag
    engine = AsyncEngineArgs.from_cli_args(args)
    assert engine.worker_extension_cls.endswith("DeltaSyncWorkerExtension"), arguments


def check_request(arguments: list[str]) -> None:
    """The route is one that a server with the plugin has."""
    [url] = [a for a in arguments if "localhost:8000" in a]
    path = urlsplit(url if "//" in url else f"http://{url}").path
    assert path in SERVED | {path for _, path, _, _ in server_reference.routes_and_keys()}, path
