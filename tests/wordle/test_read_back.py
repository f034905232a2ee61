"""The comparison against a server that holds the right bits, and against ones that don't."""

import pytest
import torch
from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response
from safetensors.torch import save_file

from examples.wordle.read_back import compare


@pytest.fixture
def trained(tmp_path):
    generator = torch.Generator().manual_seed(1)
    weights = {"a.weight": torch.randn(7, 5, generator=generator), "b": torch.randn(3, generator=generator)}
    save_file(weights, tmp_path / "model.safetensors")
    return tmp_path, weights


def server(weights, versions=(4,), key=None):
    app, asked = FastAPI(), []

    def version():
        return versions[min(len(asked), len(versions)) - 1]

    @app.get("/delta_sync/tensors")
    def tensors():
        asked.append("list")
        return {"version": version(), "tensors": {name: {"dtype": "BF16"} for name in weights}}

    @app.get("/delta_sync/tensors/{name:path}")
    def tensor(name: str):
        asked.append(name)
        bits = weights[name].to(torch.bfloat16)
        headers = {"X-Dtype": "BF16", "X-Shape": ",".join(map(str, bits.shape)), "X-Version": str(version())}
        return Response(bits.view(torch.uint8).numpy().tobytes(), headers=headers)

    return app


def test_equal_bits(serve, trained):
    folder, weights = trained
    result = compare(serve(server(weights)), folder)
    assert result.exact and (result.tensors, result.elements, result.version) == (2, 38, 4)
    assert result.to_dict()["bit_exact"] is True


def test_one_bit_is_seen(serve, trained):
    folder, weights = trained
    served = {name: w.to(torch.bfloat16) for name, w in weights.items()}
    served["a.weight"].view(torch.int16)[3, 2] ^= 1
    result = compare(serve(server(served)), folder)
    assert not result.exact and result.differing == {"a.weight": "1 of 70 bytes"}


def test_other_names_shapes_and_versions_are_seen(serve, trained):
    folder, weights = trained
    renamed = {"a.weight": weights["a.weight"].T.contiguous(), "c": weights["b"]}
    result = compare(serve(server(renamed, versions=(4, 5))), folder)
    assert set(result.differing) == {"a.weight", "b", "c"}
    assert "only the trainer" in result.differing["b"] and "only the server" in result.differing["c"]
    assert "version 5" in result.differing["a.weight"]


def test_nothing_compared_is_not_exact(serve, trained):
    folder, _ = trained
    assert not compare(serve(server({})), folder).exact


def test_a_server_without_read_back_is_an_error(serve, trained):
    app = FastAPI()
    app.add_api_route("/delta_sync/tensors", lambda: JSONResponse({"error": "disabled"}, status_code=404))
    with pytest.raises(Exception, match="404"):
        compare(serve(app), trained[0])


def test_no_checkpoint_is_an_error(serve, tmp_path):
    with pytest.raises(FileNotFoundError, match="trainer's weights"):
        compare(serve(server({})), tmp_path)
