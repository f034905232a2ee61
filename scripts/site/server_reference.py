"""The page of the plugin's flags, settings and routes, read out of the code."""

from __future__ import annotations

import argparse
import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HEAD = """# The server's flags, settings and routes

What `vllm serve` takes and answers once the plugin is installed. How to use it: [Serving](../SERVING.md),
[Fleet](../FLEET.md).

## Flags

| flag | meaning |
|---|---|
"""
SETTINGS = """
## Settings

`--delta-sync-config` takes these as a JSON object, `additional_config={"delta_sync": {…}}` of `LLM(…)` as a dictionary.

::: vllm_delta_plugin.config.ReplicaConfig
    options:
      members: [from_mapping]
      heading_level: 3

## Routes

All of them ask for vLLM's API key where the server has one, or for the operator's (`DELTA_SYNC_ADMIN_KEY`).

| route | what it does | key |
|---|---|---|
"""
OFFLINE = """
## In a process of your own

`LLM(model, worker_extension_cls="vllm_delta_plugin.worker_extension.DeltaSyncWorkerExtension",
additional_config={"delta_sync": {"uri": URI}})` follows a run as a server does.

::: vllm_delta_plugin.sync
"""
CONTROL = {
    "pin": "hold the version served, or `?version=N`",
    "unpin": "follow the newest version again",
    "rollback": "go back to `?version=N` and hold it",
    "reload": "read all live memory and take what differs from the newest anchor and its chain",
}


def page() -> str:
    """The page as Markdown."""
    flags = "".join(f"| `{flag}` | {_escaped(text)} |\n" for flag, text in flags_and_helps())
    routes = "".join(f"| `{method} {path}` | {does} | {key} |\n" for method, path, does, key in routes_and_keys())
    return HEAD + flags + SETTINGS + routes + OFFLINE


def flags_and_helps() -> list[tuple[str, str]]:
    """Each flag with its argument, and its help."""
    from vllm_delta_plugin.flag import add_arguments

    parser = argparse.ArgumentParser(add_help=False)
    add_arguments(parser)
    return [
        (
            f"{action.option_strings[0]} {action.metavar or '{' + ','.join(action.choices or ()) + '}'}",
            action.help or "",
        )
        for action in parser._actions
    ]


def routes_and_keys() -> list[tuple[str, str, str, str]]:
    """Method, path, meaning and key of each route that the plugin adds, by its ``add_api_route`` calls."""
    found = []
    for file in ("routes", "control_routes"):
        tree = ast.parse((ROOT / "vllm_delta_plugin" / f"{file}.py").read_text())
        functions = {n.name: ast.get_docstring(n) or "" for n in tree.body if isinstance(n, ast.AsyncFunctionDef)}
        for call in ast.walk(tree):
            if not isinstance(call, ast.Call) or getattr(call.func, "attr", "") != "add_api_route":
                continue
            [method] = next(ast.literal_eval(k.value) for k in call.keywords if k.arg == "methods")
            handler = call.args[1]
            if isinstance(handler, ast.Name):
                path = ast.literal_eval(call.args[0]).replace(":path", "")
                found.append((method, path, functions[handler.id].splitlines()[0], "API"))
            else:
                found += [(method, f"/delta_sync/{name}", CONTROL[name], "operator's") for name in _actions(tree)]
    return found


def _actions(tree: ast.Module) -> tuple[str, ...]:
    """The names that control_routes.py goes through: one that CONTROL does not explain is a KeyError."""
    [loop] = [node for node in ast.walk(tree) if isinstance(node, ast.For) and ast.unparse(node.target) == "action"]
    return tuple(ast.literal_eval(loop.iter))


def _escaped(text: str) -> str:
    return re.sub(r"([|{}*_<])", r"\\\1", text)
