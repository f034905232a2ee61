"""A model whose layers are processed after loading as vLLM's are, in manners that its kernels have or might have."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch

from vllm_delta_plugin.after_loading import Fingerprint, verify_direct
from vllm_delta_plugin.compat.process_seam import unprocessed
from vllm_delta_plugin.coverage import WeightMap, map_weights
from vllm_delta_plugin.regions import locate
from vllm_delta_plugin.trace import trace_load

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EXPERTS, INNER, HIDDEN = 2, 64, 64
SHAPES = {f"{layer}.{e}.{part}": (INNER, HIDDEN) for layer in "ab" for e in range(EXPERTS) for part in ("gate", "up")}
SHAPES |= {f"{layer}.bias": (EXPERTS, 2 * INNER) for layer in "ab"}
Process = Callable[[torch.nn.Module], None]


class Method:
    def __init__(self, process: Process) -> None:
        self.process_weights_after_loading = process


class Model(torch.nn.Module):
    """Two layers of fused experts that are processed alike, loaded an expert's part at a time."""

    def __init__(self, process: Process) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name in "ab":
            layer = torch.nn.Module()
            layer.w13 = torch.nn.Parameter(torch.randn(EXPERTS, 2 * INNER, HIDDEN).bfloat16(), requires_grad=False)
            layer.bias = torch.nn.Parameter(torch.randn(EXPERTS, 2 * INNER).bfloat16(), requires_grad=False)
            layer.gate = torch.nn.Parameter(torch.randn(4), requires_grad=False)  # of another width
            layer.register_parameter("absent", None)
            layer.quant_method = Method(process)
            self.add_module(name, layer)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.place(name).copy_(tensor)

    def place(self, name: str) -> torch.Tensor:
        layer, *rest = name.split(".")
        if rest == ["bias"]:
            return getattr(self, layer).bias.data
        expert, part = rest
        return getattr(self, layer).w13.data[int(expert)].chunk(2)[part == "up"]


def processed(
    process: Process,
    before: Callable[[Model], None] = lambda model: None,
    after: Callable[[Model], None] = lambda model: None,
) -> tuple[WeightMap, dict[str, bytes], Model]:
    """The map of a model after ``process``, and each tensor's bits as they were loaded.

    ``before`` and ``after`` do something to the model, before it is loaded and after it is processed.
    """
    model = Model(process).to(DEVICE)
    before(model)
    bits = {name: model.place(name).cpu().contiguous().view(torch.int16).numpy().tobytes() for name in SHAPES}
    weights = map_weights(model, trace_load(model, SHAPES, torch.bfloat16), SHAPES)
    fingerprint, modules = Fingerprint.take(model, weights), unprocessed(model)
    weights.let_go()
    for name in "ab":
        process(getattr(model, name))
    after(model)
    verify_direct(model, weights, fingerprint, modules)
    return weights, bits, model


def served(weights: WeightMap, name: str) -> bytes:
    """A tensor as the map finds it in live memory."""
    out = np.full(int(np.prod(SHAPES[name])), -1, np.int16)
    for region in weights.regions[name]:
        positions, places = locate(region, np.arange(region.numel))
        out[positions] = weights.storages[region.storage].bits.cpu().numpy()[places]
    return out.tobytes()


def swapped(layer: torch.nn.Module) -> None:
    """As for FlashInfer's CUTLASS kernels."""
    assert layer.absent is None
    gate, up = layer.w13.data.chunk(2, dim=1)
    layer.w13 = torch.nn.Parameter(torch.cat([up, gate], dim=1), requires_grad=False)


def shuffled_in_blocks(layer: torch.nn.Module) -> None:
    """As for FlashInfer's TensorRT-LLM kernels: gate and up interleaved, rows shuffled in tiles, columns in blocks."""
    rows = layer.w13.data.view(EXPERTS, 2, INNER, HIDDEN).transpose(1, 2).reshape(EXPERTS, -1, 8, 4, HIDDEN)
    blocks = rows.transpose(2, 3).reshape(EXPERTS, 2 * INNER, HIDDEN // 16, 16).transpose(1, 2)
    layer.w13.data.copy_(blocks.reshape(layer.w13.shape))
    layer.bias.data.copy_(layer.bias.data.view(EXPERTS, 2, INNER).transpose(1, 2).reshape(EXPERTS, -1))


def padded(layer: torch.nn.Module) -> None:
    wide = layer.w13.new_zeros(EXPERTS, 2 * INNER, HIDDEN + 32)
    wide[..., :HIDDEN] = layer.w13
    layer.w13 = torch.nn.Parameter(wide, requires_grad=False)


def transposed(layer: torch.nn.Module) -> None:
    layer.w13.data = layer.w13.data.transpose(1, 2).contiguous()


def split(layer: torch.nn.Module) -> None:
    gate, up = layer.w13.data.chunk(2, dim=1)
    layer.w13 = torch.nn.Parameter(gate.contiguous(), requires_grad=False)
    layer.w3 = torch.nn.Parameter(up.contiguous(), requires_grad=False)


def split_in_two(layer: torch.nn.Module) -> None:
    """Each gate and each up, in two parameters."""
    halves = layer.w13.data.unflatten(1, (2, 2, -1)).unbind(2)
    layer.w13 = torch.nn.Parameter(halves[0].contiguous(), requires_grad=False)
    layer.w3 = torch.nn.Parameter(halves[1].contiguous(), requires_grad=False)


def seen_twice(layer: torch.nn.Module) -> None:
    swapped(layer)
    layer.view = torch.nn.Parameter(layer.w13.data[:1], requires_grad=False)


def irregular(layer: torch.nn.Module) -> None:
    rows = layer.w13.data.view(EXPERTS, -1, 16 * HIDDEN)[:, [5, 0, 2, 7, 6, 1, 3, 4]]
    layer.w13.data.copy_(rows.reshape(layer.w13.shape))


def doubled(layer: torch.nn.Module) -> None:
    layer.w13.data.mul_(2)


def repeated(layer: torch.nn.Module) -> None:
    layer.w13 = torch.nn.Parameter(layer.w13.data.repeat(2, 1, 1), requires_grad=False)


def left_out(layer: torch.nn.Module) -> None:
    layer.w13 = torch.nn.Parameter(layer.w13.data[:, 1:].clone(), requires_grad=False)


def scattered(layer: torch.nn.Module) -> None:
    order = torch.randperm(layer.w13.numel(), generator=torch.Generator().manual_seed(0))
    layer.w13.data.copy_(layer.w13.data.view(-1)[order].view(layer.w13.shape))


def by_value(layer: torch.nn.Module) -> None:
    layer.w13.data.copy_(layer.w13.data.sort(dim=-1).values)


def strict(layer: torch.nn.Module) -> None:
    assert layer.w13.isfinite().all()
    swapped(layer)


def exchanged(layer: torch.nn.Module) -> None:
    swapped(layer)
    torch.distributed.broadcast(layer.w13.data.cpu().float(), src=0)


def gone(layer: torch.nn.Module) -> None:
    layer.kept = [layer.w13.data, layer.bias.data]
    del layer.w13, layer.bias


def narrowed(layer: torch.nn.Module) -> None:
    layer.w13 = torch.nn.Parameter(layer.w13.data.to(torch.float8_e4m3fn), requires_grad=False)
    layer.bias = torch.nn.Parameter(layer.bias.data.to(torch.float8_e4m3fn), requires_grad=False)


def only_of_one(layer: torch.nn.Module) -> None:
    if hasattr(layer, "wide"):
        padded(layer)
    else:
        swapped(layer)
