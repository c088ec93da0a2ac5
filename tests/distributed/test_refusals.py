"""What can't be split, and ranks that are not alike, are refused at the start, by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from helpers.rank_workloads import CONFIG
from helpers.ranks import FakeGroup, run_program

from mlx_paged.cache import Sequences
from mlx_paged.engine.engine import Engine
from mlx_paged.errors import ArgumentError
from mlx_paged.loading import demo_model_path
from mlx_paged.loading.launched import files_facts
from mlx_paged.models import qwen3
from mlx_paged.models.kv_cache import make_kv_cache
from mlx_paged.models.mlx_lm.draft_head import LAYOUTS, DraftHead


def model_of(**changes: Any) -> qwen3.Model:
    return qwen3.Model(qwen3.ModelArgs.from_dict(CONFIG | changes))


@pytest.mark.parametrize(
    ("num_ranks", "changes", "message"),
    [
        (
            8,
            {},
            "num_key_value_heads=4 of the model is not divisible by 8 ranks; start another number",
        ),
        (3, {}, "num_key_value_heads=4 of the model is not divisible by 3 ranks"),
        (4, {"intermediate_size": 130}, "intermediate_size=130 of the model is not divisible by 4"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_by_name(
    num_ranks: int, changes: dict[str, int], message: str
):
    model = model_of(**changes)
    with pytest.raises(ArgumentError, match=re.escape(message)):
        model.shard(FakeGroup(num_ranks))
    assert model.group is None
    assert model.layer_specs[0].num_kv_heads == 4


def test_groups_of_a_scale_that_would_be_cut_are_refused_by_name():
    model = model_of(intermediate_size=192)
    nn.quantize(model, group_size=64, bits=4)
    with pytest.raises(
        ArgumentError,
        match=r"model\.layers\.1\.mlp\.down_proj has 192 inputs in groups of 64 .*which 2 ranks",
    ):
        model.shard(FakeGroup(2))


@pytest.mark.parametrize("bits", [None, 4])
def test_the_ranks_shares_of_a_layer_add_up_to_the_whole(bits: int | None):
    def whole() -> qwen3.Model:
        mx.random.seed(1)
        model = model_of()
        if bits is not None:
            nn.quantize(model, group_size=32, bits=bits)
        return model

    x = mx.random.normal((3, CONFIG["hidden_size"]), key=mx.random.key(2))
    mlp = whole().layers[0].mlp
    shares = []
    for rank in range(4):
        model = whole()
        model.shard(FakeGroup(4, rank))
        assert model.layer_specs[0].num_kv_heads == 1
        assert model.layer_specs[0].num_heads == 2
        share = model.layers[0].mlp
        hidden = nn.silu(share.gate_proj(x)) * share.up_proj(x)
        down = share.down_proj
        if bits is None:
            shares.append(hidden @ down.weight.T)
        else:
            shares.append(
                mx.quantized_matmul(
                    hidden, down.weight, down.scales, down.biases, group_size=32, bits=bits
                )
            )
    error = mx.abs(sum(shares[1:], shares[0]) - mlp(x)).max().item()
    # Sums of 128 products in float32, in another order.
    assert error <= 128 * 2**-24 * mx.abs(mlp(x)).max().item() + 1e-6


def test_the_ranks_add_up_two_vectors_for_each_layer_and_token(monkeypatch: pytest.MonkeyPatch):
    """What docs/guide/several-macs.md says of the bytes that a step sends."""
    model, summed = model_of(), []
    model.shard(FakeGroup(2))
    monkeypatch.setattr(mx.distributed, "all_sum", lambda x, **_: summed.append(x.shape) or x)
    cache = make_kv_cache(model, kv_cache_bytes="8blocks", backend="reference")
    with Sequences(cache).step({"a": 3}):
        model(mx.zeros((3,), dtype=mx.int32), cache.layers)
    assert summed == [(3, CONFIG["hidden_size"])] * 2 * CONFIG["num_hidden_layers"]


def test_a_model_that_can_not_be_split_says_so():
    class Whole(qwen3.Model):
        shard = qwen3.LanguageModel.shard

    with pytest.raises(NotImplementedError, match="can't be split over ranks"):
        Whole(qwen3.ModelArgs.from_dict(CONFIG)).shard(FakeGroup(2))


def test_a_draft_model_is_refused_by_name():
    model = model_of()
    model.shard(FakeGroup(2))
    for draft_model in (model_of(), DraftHead(model, LAYOUTS["qwen3"])):
        with pytest.raises(ArgumentError, match="draft_model can't be combined with several ranks"):
            Engine(model, draft_model=draft_model, kv_cache_bytes="8blocks")


def test_files_that_differ_in_one_byte_have_other_facts(tmp_path: Path):
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(bytes(3_000_000))
    one, other = tmp_path / "one", tmp_path / "other"
    assert files_facts(one, "the model") == files_facts(other, "the model")
    with (other / "model.safetensors").open("r+b") as file:
        file.seek(10)
        file.write(b"1")
    differing = dict(
        files_facts(one, "the model").items() ^ files_facts(other, "the model").items()
    )
    assert list(differing) == ["the file model.safetensors of the model"]
    assert "the file tokenizer.json of the model" in files_facts(demo_model_path(), "the model")


@pytest.mark.slow
def test_ranks_that_differ_are_refused_with_both_values_and_the_least_budget_is_everybodys(
    tmp_path: Path,
):
    ended = run_program(2, "refusals", tmp_path, str(tmp_path))
    assert [(each.status, each.err) for each in ended] == [(0, "")] * 2
    first, second = (each.out.splitlines() for each in ended)
    assert first == second[:-1]
    assert second[-1].startswith("[engine] add_request is for rank 0, and this is rank 1")
    *refused, num_blocks = first
    expected = [
        r"\[ranks\] the setting block_size is 32 on rank 0 and 16 on rank 1; it must be the same",
        r"\[ranks\] the setting kv_format is None on rank 0 and 8 on rank 1",
        r"\[ranks\] draft_model can't be combined with several ranks",
        r"\[load\] adapter_path: adapters can't be split over ranks; fuse them",
        r"\[ranks\] the version of mlx-paged is \d.* on rank 0 and 0\.0\.1 on rank 1",
        r"\[ranks\] the file model\.safetensors of the model is \d+ bytes \(\w+\) on rank 0 and ",
    ]
    for message, pattern in zip(refused, expected, strict=True):
        assert re.match(pattern, message)
    # A block of 16 tokens: K and V of 32 floats, in one of the 2 KV heads of each of 4 layers.
    assert int(num_blocks) == 3_000_000 // (16 * 2 * 32 * 4 * 4) - 1
