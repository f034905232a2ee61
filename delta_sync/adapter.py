"""A LoRA adapter as one object: a safetensors file that PEFT loads, with its config in the header (FORMAT.md, 5.5)."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from delta_sync.anchor_files import Tensor, parse_shard
from delta_sync.container import parse_json, write_tensors
from delta_sync.digest import digest, tensor_key
from delta_sync.errors import FormatError, IntegrityError
from delta_sync.limits import DEFAULT_LIMITS, Limits
from delta_sync.manifest import Manifest, TensorState
from delta_sync.strict_json import Fields, clip

if TYPE_CHECKING:
    from delta_sync.ledger import Ledger

FORMAT = "delta-sync-adapter"
PREFIX = "base_model.model."  # PEFT's, before the names of the base model's modules
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"  # a folder that PEFT loads
_NAME = re.compile(r"base_model\.model\.(.+)\.(?:lora_(A|B)\.weight|lora_embedding_(A|B))")
_RANKS, _MODULES = 2**16, 10**5


@dataclass(frozen=True)
class AdapterConfig:
    """What of PEFT's LoraConfig decides an adapter's effect: weights are base + B @ A * ``scaling``.

    ``target_modules``: the adapted modules' names, or their last parts. ``base_model`` and ``task_type`` are for PEFT.
    """

    r: int
    lora_alpha: float
    target_modules: tuple[str, ...]
    use_rslora: bool = False
    base_model: str | None = None
    task_type: str | None = None

    @property
    def scaling(self) -> float:
        """What B @ A is multiplied by."""
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)

    def to_peft(self) -> dict[str, object]:
        """The content of ``adapter_config.json``."""
        return {
            "peft_type": "LORA",
            "task_type": self.task_type,
            "base_model_name_or_path": self.base_model,
            "r": self.r,
            "lora_alpha": self.lora_alpha,
            "target_modules": list(self.target_modules),
            "use_rslora": self.use_rslora,
            "bias": "none",
            "inference_mode": True,
        }

    @classmethod
    def from_peft(cls, value: object, what: str) -> AdapterConfig:
        """Read such a content; FormatError for another kind of adapter, or a field of the wrong type."""
        fields = Fields(value, what)
        fields.choice("peft_type", ("LORA",))
        fields.choice("bias", ("none",))
        alpha = fields.get("lora_alpha")
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < math.inf:
            fields.fail("lora_alpha", "a number above 0", alpha)
        targets = fields.array("target_modules", _MODULES)
        if not targets or not all(isinstance(name, str) and name for name in targets):
            fields.fail("target_modules", "names of modules", targets)
        rslora = fields.get("use_rslora")
        if not isinstance(rslora, bool):
            fields.fail("use_rslora", "true or false", rslora)
        names = tuple(str(name) for name in targets)
        base, task = _text(fields, "base_model_name_or_path"), _text(fields, "task_type")
        return cls(fields.integer("r", 1, _RANKS), alpha, names, rslora, base, task)


@dataclass(frozen=True)
class Adapter:
    """One version's adapter; ``tensors`` by PEFT's names, their bits read-only views into the object."""

    config: AdapterConfig
    tensors: Mapping[str, Tensor]

    @property
    def modules(self) -> dict[str, tuple[Tensor, Tensor]]:
        """The base model's module -> its A ``[r, inputs]`` and its B ``[outputs, r]``."""
        pairs: dict[str, dict[str, Tensor]] = {}
        for name, tensor in self.tensors.items():
            module, kind = split_name(name)
            pairs.setdefault(module, {})[kind] = tensor
        return {module: (pair["A"], pair["B"]) for module, pair in pairs.items()}

    @property
    def states(self) -> dict[str, TensorState]:
        """Every tensor's state, from its bits."""
        return {
            name: TensorState(kind.name, shape, digest(bits, tensor_key(name)))
            for name, kind, shape, bits in self.tensors.values()
        }


def split_name(name: str) -> tuple[str, str]:
    """The module that a tensor of an adapter is for, and "A" or "B"; FormatError for other names than PEFT's."""
    found = _NAME.fullmatch(name)
    if found is None:
        expected = f"{PREFIX}MODULE.lora_A.weight, lora_B.weight, lora_embedding_A or lora_embedding_B"
        raise FormatError(f"tensor {clip(name)!r} of an adapter", expected=expected, got="another name")
    return found[1], found[2] or found[3]


def encode_adapter(run: str, version: int, config: AdapterConfig, tensors: Iterable[Tensor]) -> bytes:
    """The object of one version: (name, dtype, shape, bits ``[n]``) by PEFT's names; FormatError."""
    metadata = {
        "format": FORMAT,
        "format_version": "1",
        "run": run,
        "version": str(version),
        "adapter_config": json.dumps(config.to_peft(), sort_keys=True, separators=(",", ":")),
    }
    data = write_tensors(metadata, sorted(tensors, key=lambda tensor: tensor[0]))
    decode_adapter(data, f"adapter of version {version}")
    return data


def decode_adapter(data: bytes, what: str, limits: Limits = DEFAULT_LIMITS) -> Adapter:
    """Read an adapter's object; FormatError for anything that is not pairs of A and B of the config's rank."""
    tensors = {tensor[0]: tensor for tensor in parse_shard(data, what, limits)}
    metadata = _metadata(data, what)
    for name, expected in (("format", FORMAT), ("format_version", "1")):
        if metadata.get(name) != expected:
            raise FormatError(f"{name} of {what}", expected=expected, got=clip(metadata.get(name)))
    text = metadata.get("adapter_config")
    config = AdapterConfig.from_peft(parse_json(text if isinstance(text, str) else "", what), f"config of {what}")
    _check(tensors, config, what)
    return Adapter(config, tensors)


def read_adapter(ledger: Ledger, manifest: Manifest) -> Adapter:
    """A version's adapter, its object and every tensor proven; IntegrityError, FormatError or NotFoundError."""
    [ref] = manifest.objects
    data = ledger.read_object(ref)
    adapter = decode_adapter(data, f"object {ref.key}", ledger.limits)
    metadata = _metadata(data, ref.key)
    named, meant = (metadata.get("run"), metadata.get("version")), (manifest.run, str(manifest.version))
    if named != meant:
        raise IntegrityError(f"run and version in object {ref.key}", expected=meant, got=named)
    states = adapter.states
    for name in sorted(states.keys() | manifest.tensors.keys()):
        if states.get(name) != manifest.tensors.get(name):
            what = f"tensor {clip(name)!r} of object {ref.key}"
            raise IntegrityError(what, expected=manifest.tensors.get(name), got=states.get(name))
    return adapter


def _metadata(data: bytes, what: str) -> dict[str, Any]:
    """The header's ``__metadata__`` of a file that ``parse_shard`` has read."""
    header = parse_json(data[8 : 8 + int.from_bytes(data[:8], "little")], what)
    metadata = header.get("__metadata__")
    return metadata if isinstance(metadata, dict) else {}


def _check(tensors: Mapping[str, Tensor], config: AdapterConfig, what: str) -> None:
    shapes: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, _, shape, _ in tensors.values():
        module, kind = split_name(name)
        shapes.setdefault(module, {})[kind] = shape
    if not shapes or len({kind.name for _, kind, _, _ in tensors.values()}) != 1:
        raise FormatError(what, expected="tensors of one element type", got="none, or several")
    for module, pair in shapes.items():
        a, b = pair.get("A", ()), pair.get("B", ())
        if len(a) != 2 or len(b) != 2 or a[0] != config.r or b[1] != config.r:
            expected = f"A [{config.r}, inputs] and B [outputs, {config.r}]"
            raise FormatError(f"module {clip(module)!r} of {what}", expected=expected, got=f"A {[*a]}, B {[*b]}")


def _text(fields: Fields, name: str) -> str | None:
    value = fields.value.get(name)
    if value is not None and not isinstance(value, str):
        fields.fail(name, "text or null", value)
    return value
