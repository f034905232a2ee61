"""The serving image holds a checkpoint's names and bits, each once, for every kind of model; others are refused."""

from __future__ import annotations

import pytest
import tiny
import torch

from delta_sync.errors import MappingError
from trl_callback.serving_image import ServingImage, compute_dtype, plain_name

MODELS = {"llama-tied": tiny.llama, "llama-untied": lambda: tiny.llama(tied=False), "qwen3-moe": tiny.qwen3_moe,
          "mixtral": tiny.mixtral, "llava": tiny.llava}  # fmt: skip


def image_of(model: torch.nn.Module, dtype: str = "BF16") -> ServingImage:
    return ServingImage(model, lambda name: dtype)


def as_bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_names_shapes_and_bits_are_the_checkpoints(kind: str, dtype: str) -> None:
    model = MODELS[kind]()
    torch_dtype = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[dtype]
    expected = tiny.cast_state(model, torch_dtype)
    seen = {t.name: (t.shape, t.bits.tobytes()) for t in image_of(model, dtype)}
    assert seen == {name: (tuple(tensor.shape), as_bits(tensor)) for name, tensor in expected.items()}


def test_the_anchor_of_a_saved_checkpoint_has_the_same_names(tmp_path) -> None:
    from safetensors import safe_open

    for kind, build in MODELS.items():
        model = build()
        model.save_pretrained(tmp_path / kind)
        names = set()
        for shard in (tmp_path / kind).glob("*.safetensors"):
            with safe_open(shard, "pt") as opened:
                names |= set(opened.keys())
        assert names == {t.name for t in image_of(model)}, kind


def test_tied_weights_come_once() -> None:
    names = [t.name for t in image_of(tiny.llama(tied=True))]
    assert "lm_head.weight" not in names and names.count("model.embed_tokens.weight") == 1
    assert "lm_head.weight" in [t.name for t in image_of(tiny.llama(tied=False))]


def test_the_dtype_is_asked_for_each_tensor() -> None:
    model = tiny.llama()
    image = ServingImage(model, lambda name: "F32" if "norm" in name else "BF16")
    for tensor in image:
        assert tensor.dtype.name == ("F32" if "norm" in tensor.name else "BF16")


def test_wrappers_leave_no_trace_in_names() -> None:
    model = tiny.llama()
    plain = [t.name for t in image_of(model)]
    model.model.layers[0].self_attn = torch.compile(model.model.layers[0].self_attn)
    assert [t.name for t in image_of(torch.compile(model))] == plain
    assert plain_name("model._fsdp_wrapped_module.layers.0._checkpoint_wrapped_module.w") == "model.layers.0.w"


def test_only_persistent_buffers_are_published() -> None:
    model = tiny.llama()
    before = [t.name for t in image_of(model)]
    assert not any("inv_freq" in name for name in before)
    model.model.register_buffer("kept", torch.ones(3))
    model.model.register_buffer("scratch", torch.ones(3), persistent=False)
    assert [t.name for t in image_of(model)] == [*before, "model.kept"]


def test_bits_survive_the_cast() -> None:
    model = tiny.llama().to(torch.bfloat16)
    odd = torch.tensor([0x7FC1, 0x8000, 0x7F80, 0x0001, 0xFFFF - 0x10000 + 0x10000 - 1], dtype=torch.int32)
    with torch.no_grad():
        flat = model.model.embed_tokens.weight.view(-1)
        flat[:5] = odd.to(torch.int16).view(torch.bfloat16)
    embedding = next(t for t in image_of(model) if t.name == "model.embed_tokens.weight")
    assert embedding.bits[:5].tolist() == [value & 0xFFFF for value in odd.tolist()]


def refused(model: torch.nn.Module) -> str:
    with pytest.raises(MappingError) as caught:
        list(image_of(model))
    assert caught.value.remedy
    return str(caught.value)


def test_what_cannot_be_published_is_refused_by_name() -> None:
    sharded = tiny.llama()
    sharded.model.norm.weight.ds_tensor = torch.ones(3)
    assert "'model.norm.weight'" in refused(sharded) and "ZeRO-3" in refused(sharded)

    with torch.device("meta"):
        meta = tiny.llama()
    assert "'model.embed_tokens.weight'" in refused(meta) and "meta" in refused(meta)

    quantised = tiny.llama()
    quantised.model.norm.weight = torch.nn.Parameter(torch.ones(32, dtype=torch.int8), requires_grad=False)
    assert "'model.norm.weight'" in refused(quantised) and "int8" in refused(quantised)


def test_a_shard_is_refused_where_only_whole_weights_are_expected() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = tiny.llama()
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        assert "FSDP2" in refused(model)
    finally:
        torch.distributed.destroy_process_group()


def test_the_precision_a_trainer_computes_in() -> None:
    model = tiny.llama()
    assert compute_dtype(model, bf16=True, fp16=False) == "BF16"
    assert compute_dtype(model, bf16=False, fp16=True) == "F16"
    assert compute_dtype(model, bf16=False, fp16=False) == "F32"
    assert compute_dtype(model.to(torch.bfloat16), bf16=False, fp16=False) == "BF16"
