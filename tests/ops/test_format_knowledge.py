"""A K/V format is known in ``ops/formats.py`` alone: no other module asks which one it has, and one
that this test adds runs on plain MLX.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import mlx_paged
from mlx_paged.cache import ContiguousKVCache, KVCacheConfig, LayerSpec, PagedKVCache, Sequences
from mlx_paged.errors import ArgumentError
from mlx_paged.ops import AttentionShape, KVFormat, Parts, RowFormat, choose_backend, kernels
from mlx_paged.ops.formats import BlockPairs

PACKAGE = Path(mlx_paged.__file__).parent
FORMATS = PACKAGE / "ops/formats.py"
CLASSES = {"AffineFormat", "DenseFormat"}
# Re-exports, for users.
EXPORTS = {PACKAGE / "ops/__init__.py", PACKAGE / "cache/__init__.py"}


def test_no_other_module_asks_which_format_it_has():
    found = {}
    for file in {*PACKAGE.rglob("*.py")} - EXPORTS - {FORMATS}:
        nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
        names = {node.id for node in nodes if isinstance(node, ast.Name)}
        names |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        found[file.name] = names & {*CLASSES, "is_dense"}
    assert {name: known for name, known in found.items() if known} == {}


@dataclass(frozen=True)
class HalfRows(RowFormat):
    """Rows of float32 that are stored as float16."""

    part_names = ("halves",)

    def __str__(self) -> str:
        return "halves"

    def part_shapes(self, width: int) -> tuple[tuple[int, mx.Dtype], ...]:
        return ((width, mx.float16),)

    def width(self, parts: Parts) -> int:
        return parts[0].shape[-1]

    def encode(self, rows: mx.array) -> Parts:
        return (rows.astype(mx.float16),)

    def decode(self, parts: Parts) -> mx.array:
        return parts[0].astype(self.mx_dtype)

    def multiply_blocks(
        self, rows: mx.array, slabs: Parts, pairs: BlockPairs, transpose: bool
    ) -> mx.array:
        blocks = self.decode((slabs[0][pairs.block_ids],))
        rows = rows if pairs.row_ids is None else rows[pairs.row_ids]
        return rows @ (blocks.swapaxes(-1, -2) if transpose else blocks)


HALVES = KVFormat(HalfRows(), HalfRows())


def attended(format: KVFormat) -> tuple[list[np.ndarray], PagedKVCache]:
    """What the steps of two sequences give: prompts, a chunk beside a decode, and decodes."""
    spec = LayerSpec(2, 32, 32, format=format)
    seqs = Sequences(PagedKVCache(KVCacheConfig((spec,), block_size=8, num_blocks=20)))
    rng, outputs = np.random.default_rng(0), []
    for lengths in ({"a": 11, "b": 3}, {"a": 1, "b": 9}, {"a": 1, "b": 1}):
        num_tokens = sum(lengths.values())
        q, k, v = (
            mx.array(rng.uniform(-1, 1, (num_tokens, heads, 32)).astype(np.float16)).astype(
                mx.float32
            )
            for heads in (4, 2, 2)
        )
        with seqs.step(lengths):
            out = seqs.cache.layers[0].update_and_attend(q, k, v, scale=0.2)
            mx.eval(out)
        outputs.append(np.array(out))
    return outputs, seqs


def test_a_format_that_is_added_runs_on_plain_mlx_and_is_counted():
    # The rows are halves already, so nothing is lost in this format.
    (found, halves), (expected, floats) = attended(HALVES), attended(KVFormat.dense())
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    assert halves.cache.config.nbytes == floats.cache.config.nbytes / 2
    assert halves.cache.layers[0].spec.format.description == "stored as halves, with float32 scales"


def test_what_does_not_know_the_format_refuses_it_by_name():
    assert kernels.why_unsupported(32, 32, 8, HALVES) == (
        "halves has no Metal kernel: only plain MLX reads it"
    )
    shape = AttentionShape(2, 2, 32, 32, 8, HALVES)
    assert choose_backend("auto", [shape]).name == "reference"
    with pytest.raises(ValueError, match="mlx-lm has no such format"):
        _ = HALVES.stock_quantisation
    config = KVCacheConfig((LayerSpec(2, 32, 32, format=HALVES),), num_blocks=4)
    with pytest.raises(ArgumentError, match="model's dtype and not as halves"):
        ContiguousKVCache(config)
