"""Names and shapes of a checkpoint's tensors, from its safetensors headers alone."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from delta_sync.errors import MappingError
from delta_sync.limits import DEFAULT_LIMITS

_REMEDY = "serve an unquantised safetensors checkpoint from a local folder or the Hugging Face cache"


def checkpoint_tensors(model: str, revision: str | None = None, cache: str | None = None) -> dict[str, tuple[int, ...]]:
    """Map every tensor of the checkpoint at ``model`` (folder or cached repository) to its shape; MappingError."""
    folder = _folder(model, revision, cache)
    out: dict[str, tuple[int, ...]] = {}
    for path in _shards(folder):
        out.update(_header(path))
    return out


def _folder(model: str, revision: str | None, cache: str | None) -> Path:
    if Path(model).is_dir():
        return Path(model)
    if Path(model).is_file() or "://" in model:
        raise MappingError(
            f"model {model!r}", expected="a safetensors checkpoint folder", got="a file or URL", remedy=_REMEDY
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, cache_dir=cache, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError) as error:
        raise MappingError(
            f"model {model!r}", expected="a cached checkpoint", got=str(error), remedy=_REMEDY
        ) from error


def _shards(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = json.loads(index.read_text())["weight_map"]
        return [folder / name for name in sorted(set(weight_map.values()))]
    shards = sorted(folder.glob("*.safetensors"))
    model_shards = [path for path in shards if not path.name.startswith(("consolidated", "adapter"))]
    if not model_shards:
        found = sorted({path.suffix for path in folder.iterdir() if path.suffix in {".gguf", ".bin", ".pt", ".pth"}})
        raise MappingError(f"checkpoint {folder.name!r}", expected="*.safetensors", got=found or "none", remedy=_REMEDY)
    return model_shards


def _header(path: Path) -> dict[str, tuple[int, ...]]:
    with path.open("rb") as file:
        prefix = file.read(8)
        size = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= size <= DEFAULT_LIMITS.header_bytes:
            raise MappingError(f"checkpoint file {path.name!r}", expected="a safetensors header", got=f"{size} bytes")
        entries = json.loads(file.read(size))
    return {name: tuple(entry["shape"]) for name, entry in entries.items() if name != "__metadata__"}
