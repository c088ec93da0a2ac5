"""Damaged GGUF files: an error of one line or a model, and nothing else."""

from __future__ import annotations

import random
import warnings
from pathlib import Path

import numpy as np
import pytest
from helpers.gguf_files import demo_tokenizer, metadata_of, tensors_of, write
from mlx.nn.layers.base import Module

from mlx_paged.loading import LoadError
from mlx_paged.loading.gguf.loader import load_gguf

TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
}
NUM_TOKENS = 280  # bytes, and a few more


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A small whole file, most of it head."""
    layer = "model.layers.0"
    shapes = {
        "model.embed_tokens.weight": (NUM_TOKENS, 32),
        "model.norm.weight": (32,),
        f"{layer}.input_layernorm.weight": (32,),
        f"{layer}.post_attention_layernorm.weight": (32,),
        f"{layer}.self_attn.q_proj.weight": (32, 32),
        f"{layer}.self_attn.k_proj.weight": (16, 32),
        f"{layer}.self_attn.v_proj.weight": (16, 32),
        f"{layer}.self_attn.o_proj.weight": (32, 32),
        f"{layer}.self_attn.q_norm.weight": (16,),
        f"{layer}.self_attn.k_norm.weight": (16,),
        **{f"{layer}.mlp.{name}_proj.weight": (32, 32) for name in ("gate", "up", "down")},
    }
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    keys = {**metadata_of(TINY, "qwen3"), **demo_tokenizer()}
    for name in ("tokens", "scores", "token_type"):
        keys[f"tokenizer.ggml.{name}"] = keys[f"tokenizer.ggml.{name}"][:NUM_TOKENS]
    path = tmp_path_factory.mktemp("whole") / "x.gguf"
    write(path, "qwen3", keys, tensors_of(weights, TINY, "qwen3", "Q8_0"))
    return path.read_bytes()


def outcome(path: Path, content: bytes) -> str:
    """``"a model"``, or an error's line."""
    path.write_bytes(content)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model, _, _ = load_gguf(path)
        except LoadError as error:
            message = str(error)
            assert message.startswith("[load] ")
            assert "\n" not in message
            assert len(message) < 1000
            return message
    assert isinstance(model, Module)
    return "a model"


def test_a_whole_file_is_a_model(content, tmp_path):
    assert outcome(tmp_path / "x.gguf", content) == "a model"


def test_a_file_that_is_cut_off_anywhere_is_refused(content, tmp_path):
    rng = random.Random(0)
    lengths = [*range(0, 64), *(rng.randrange(len(content)) for _ in range(150))]
    for length in lengths:
        said = outcome(tmp_path / "x.gguf", content[:length])
        assert "truncated" in said or "is not a GGUF file" in said, length


@pytest.mark.parametrize("seed", range(4))
def test_bytes_that_are_changed_give_a_line_or_a_model(seed, content, tmp_path):
    rng = random.Random(seed)
    # The head of the file, and most often the metadata and the tensors' places at its ends.
    head = content.index(b"blk.0.ffn_up.weight") + 64
    ends = [*range(4, 1400), *range(head - 1000, head)]
    said = set()
    for _ in range(60):
        damaged = bytearray(content)
        for _ in range(rng.choice((1, 1, 2, 8))):
            at = rng.choice(ends) if rng.random() < 0.8 else rng.randrange(4, head)
            damaged[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        said.add(outcome(tmp_path / "x.gguf", bytes(damaged)))
    assert len(said) > 10
