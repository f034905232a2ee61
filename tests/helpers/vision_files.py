"""What a checkpoint of a model that sees images has beside its weights, tiny."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from helpers.tiny_models import write_tokenizer

TOKENS = {"<|vision_start|>": 490, "<|vision_end|>": 491, "<|image_pad|>": 492, "<|video_pad|>": 493}
TOKEN_IDS = {
    f"{name}_token_id": TOKENS[f"<|{token}|>"]
    for name, token in (
        ("vision_start", "vision_start"),
        ("vision_end", "vision_end"),
        ("image", "image_pad"),
        ("video", "video_pad"),
    )
}
PATCH, MERGED = 14, 2
SIDE = 2 * PATCH * MERGED  # pixels; four tokens
PROMPT = [1, TOKENS["<|vision_start|>"], TOKENS["<|image_pad|>"], TOKENS["<|vision_end|>"], 7]
_SIZES: dict[str, Any] = {
    "patch_size": PATCH,
    "merge_size": MERGED,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": (SIDE // 2) ** 2, "longest_edge": SIDE**2},
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}


def write(folder: Path, vocab: int, videos: str) -> None:
    """Tokenizer and settings of the processors; ``videos`` names the class for them."""
    write_tokenizer(folder, vocab, TOKENS)
    images = {**_SIZES, "image_processor_type": "Qwen2VLImageProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    (folder / "video_preprocessor_config.json").write_text(json.dumps({**_SIZES, "video_processor_type": videos}))


def image() -> Any:
    """A picture of noise, always the same."""
    import numpy as np
    from PIL import Image

    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8))
