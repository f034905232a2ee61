"""Every layout of the benchmark restores every bit, and its figures are what the bytes say."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from wire_layouts import compare, found

from delta_sync.peer_layouts import LAYOUTS, changed_elements


def changes_of(rate: float, elements: int = 200_000):
    rng = np.random.default_rng(3)
    changes = []
    for name, size in (("a", elements), ("untouched", 1000), ("sparse", 300_000)):
        old = rng.integers(0, 2**16, size).astype(np.uint16)
        new = old.copy()
        share = {"a": rate, "untouched": 0, "sparse": 4 / size}[name]
        at = rng.random(size) < share
        new[at] += rng.choice(np.array([1, 65535, 2, 300], np.uint16), int(at.sum()), p=[0.45, 0.45, 0.09, 0.01])
        changes.append(changed_elements(name, (size,), old, new))
    return changes


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name.split(",")[0])
@pytest.mark.parametrize("rate", [0.001, 0.05])
def test_layouts_restore_every_bit(layout, rate):
    changes = changes_of(rate)
    for c, (positions, bits) in zip(changes, layout.decode(layout.encode(changes), changes), strict=True):
        np.testing.assert_array_equal(positions, c.positions)
        np.testing.assert_array_equal(bits, c.new)


def test_ours_is_the_smallest_and_trls_takes_six_bytes():
    result = compare(changes_of(0.006), 501_000)
    sizes = {row["layout"].removesuffix(": gap8-ulp8-zstd"): row["bytes_per_changed"] for row in result["layouts"]}
    assert sizes["TRL: int32 index + bf16"] == 6
    assert sizes["ours"] <= min(size for name, size in sizes.items() if "context" not in name)
    assert result["ours_over_trl"] == pytest.approx(sizes["ours"] / 6, abs=1e-4)
    assert sizes["ours"] <= 0.35 * 6


@pytest.mark.parametrize(
    ("compute", "recipe"),
    [("float32", {}), ("bfloat16", {}), ("float32", {"objective": "sft", "masters": "bfloat16", "weight_decay": 0.01})],
)
def test_a_training_steps_changes_are_measured(compute, recipe):
    """The benchmark's own path from optimizer step to table, on a model of a thousandth the size."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    import real_deltas

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=100, num_key_value_heads=2, tie_word_embeddings=True, **sizes)
    model = transformers.LlamaForCausalLM(config).float()
    tokens = [i * i % 100 for i in range(500)]
    steps = list(real_deltas.train(model, tokens, real_deltas.Recipe(3e-4, **recipe), 2, getattr(torch, compute)))
    assert [c.shape for c in steps[0]] == [tuple(p.shape) for p in model.parameters()]
    after = dict(model.named_parameters())
    for first, last in zip(*steps, strict=True):
        np.testing.assert_array_equal(first.new, last.old)
        bits = after[last.name].detach().bfloat16().view(torch.int16).numpy().view(np.uint16)
        np.testing.assert_array_equal(last.new, bits.reshape(-1))
    result = compare(found(steps[1]), sum(c.old.size for c in steps[1]))
    assert 0 < result["changed"] < result["elements"]
    assert result["ours_over_trl"] < 0.35
