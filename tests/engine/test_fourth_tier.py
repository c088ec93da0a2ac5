"""A tier of the caller's own, a dictionary, in the place of host memory, of a folder and of a file:
a preempted request, a restarted engine and a snapshot find their blocks in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from helpers.engine_runs import ask, ask_alone, greedy, make_engine, prompt, run

from mlx_paged.block_store import Fingerprint
from mlx_paged.cache.transfer import load_prefix, store_blocks
from mlx_paged.core import hash_token_blocks
from mlx_paged.core.tier import BlockHeader, Payload, Tier
from mlx_paged.errors import ArgumentError
from mlx_paged.models import qwen3
from mlx_paged.snapshots import prefix_headers


class DictTier(Tier):
    def __init__(self) -> None:
        self.blocks: dict[bytes, bytes] = {}
        self.num_loads = 0

    def has(self, key: bytes) -> bool:
        return key in self.blocks

    def load(self, key: bytes) -> bytes | None:
        self.num_loads += 1
        return self.blocks.get(key)

    def store(self, header: BlockHeader, content: Payload) -> bool:
        self.blocks[header.block_hash] = bytes(content)
        return True

    def discard(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self.blocks.pop(key, None)


def test_a_preempted_request_goes_on_with_its_blocks(model: qwen3.Model):
    tier = DictTier()
    engine = make_engine(
        model, kv_cache_bytes="8blocks", swap_bytes="8blocks", max_num_seqs=2, watermark=0
    )
    engine.swap_space.tier = tier
    requests = {name: (prompt(n), greedy(60)) for name, n in (("first", 40), ("second", 41))}
    answers = ask(engine, requests)
    assert engine.stats().num_preemptions > 0 < tier.num_loads
    for name, (tokens, params) in requests.items():
        assert answers[name] == ask_alone(model, tokens, params)
    assert tier.blocks == {} and engine.stats().num_swapped_tokens == 0


def test_a_restarted_engine_finds_its_blocks(model: qwen3.Model):
    tiers: dict[str, DictTier] = {}

    def tier_of(fingerprint: Fingerprint) -> DictTier:
        return tiers.setdefault(fingerprint.digest, DictTier())

    told, expected = prompt(100), ask_alone(model, prompt(100), greedy(20))
    for num_read in (0, 96):
        engine = make_engine(model, tier=tier_of)
        engine.add_request("a", told, greedy(20))
        output = run(engine)["a"]
        assert output.outputs[0].token_ids == expected
        assert output.num_read_tokens == num_read
        assert engine.close()
    # Blocks of another size have other bytes.
    make_engine(model, tier=tier_of, block_size=8).close()
    assert [bool(tier.blocks) for tier in tiers.values()] == [True, False]


def test_a_snapshot_finds_its_blocks(model: qwen3.Model):
    old, new, told, tier = make_engine(model), make_engine(model), prompt(100), DictTier()
    expected = ask(old, {"a": (told, greedy(20))})
    headers = prefix_headers(old.cache.config, told, hash_token_blocks(told, 16))
    store_blocks(old.cache, tier, list(zip(headers, old.cached_block_ids(told), strict=True)))
    assert load_prefix(new.cache, tier, headers) == len(tier.blocks) == 6
    assert new.cached_block_ids(told[:96]) and ask(new, {"a": (told, greedy(20))}) == expected
    assert new.stats().num_hit_tokens == 96


@pytest.mark.parametrize("method", ["has", "load", "store"])
def test_a_tier_that_raises_fails_no_request(
    model: qwen3.Model, monkeypatch: pytest.MonkeyPatch, method: str
):
    def broken(*_: Any) -> bool:
        raise OSError("the cable is out")

    tier, told = DictTier(), prompt(100)
    expected = ask_alone(model, told, greedy(20))
    assert ask(make_engine(model, tier=lambda _: tier), {"a": (told, greedy(20))}) == {
        "a": expected
    }
    monkeypatch.setattr(tier, method, broken)
    engine = make_engine(model, tier=lambda _: tier)
    other = prompt(70, seed=1)
    with pytest.warns(
        UserWarning, match="the cable is out; from now on K/V are kept in memory only"
    ):
        assert ask(engine, {"a": (told, greedy(20))}) == {"a": expected}
        ask(engine, {"b": (other, greedy(20))})
        assert engine.close()
        engine.stats()


def test_what_is_no_tier_is_refused_by_name(model: qwen3.Model, tmp_path: Path):
    for options, message in (
        ({"tier": "there"}, "tier must be a function that returns a Tier, got 'there'"),
        ({"tier": DictTier, "cache_dir": tmp_path}, "tier replaces cache_dir"),
        ({"tier": lambda _: DictTier(), "kv": "basic"}, "tier needs blocks, which kv='basic'"),
    ):
        with pytest.raises(ArgumentError, match=message) as refusal:
            make_engine(model, **options)
        assert refusal.value.argument == "tier"
