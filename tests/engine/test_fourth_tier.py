"""A tier of the caller's own, a dictionary, in the place of host memory, of a folder and of a file:
a preempted request, a restarted engine and a snapshot find their blocks in it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from helpers.engine_runs import answer, ask, ask_alone, greedy, make_engine, prompt, run

from mlx_paged.block_store import Fingerprint
from mlx_paged.cache.transfer import load_prefix, store_blocks
from mlx_paged.core import hash_token_blocks
from mlx_paged.core.tier import BlockHeader, Payload, Tier
from mlx_paged.engine.engine import Engine
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
        output = answer(engine, told, greedy(20))
        assert output.outputs[0].token_ids == expected
        assert output.num_read_tokens == num_read
        assert engine.close()
        stats = engine.stats().disk_tier
        assert stats is not None and stats.num_read_blocks == num_read // 16
        num_written, nbytes = stats.num_written_blocks, stats.nbytes_written
        assert (num_written > 0, nbytes > 0) == (num_read == 0, num_read == 0)
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


METHODS = ("has", "load", "store", "note_used", "discard", "maintain", "close", "stats")


def raises(error: BaseException) -> Callable[..., Any]:
    def fail(*_: Any) -> Any:
        raise error

    return fail


async def waits(*_: Any) -> bytes:
    return b""


ODD: dict[str, Callable[..., Any]] = {
    "OSError": raises(OSError("the cable is out")),
    "SystemExit": raises(SystemExit(3)),
    "KeyboardInterrupt": raises(KeyboardInterrupt()),
    "BaseException": raises(BaseException("base")),
    "a number": lambda *_: 1.5,
    "text": lambda *_: "yes",
    "a coroutine": waits,
}
# In the main thread, which calls these methods, an interrupt may be Ctrl-C.
ODD_ANSWERS = [
    (method, answer)
    for method, answer in itertools.product(METHODS, ODD)
    if answer != "KeyboardInterrupt" or method not in ("close", "stats")
]


@pytest.mark.filterwarnings("ignore:coroutine")
@pytest.mark.filterwarnings("ignore:.*kept in memory only")
@pytest.mark.parametrize(("method", "answer"), ODD_ANSWERS)
def test_whatever_a_tier_raises_or_returns_fails_no_request(
    model: qwen3.Model, monkeypatch: pytest.MonkeyPatch, method: str, answer: str
):
    tier, told, other = DictTier(), prompt(100), prompt(70, seed=1)
    expected = ask_alone(model, told, greedy(20))
    filling = make_engine(model, tier=lambda _: tier)
    assert ask(filling, {"a": (told, greedy(20))}) == {"a": expected}
    assert filling.close()
    monkeypatch.setattr(tier, method, ODD[answer])
    engine = make_engine(model, tier=lambda _: tier)
    assert ask(engine, {"a": (told, greedy(20))}) == {"a": expected}
    ask(engine, {"b": (other, greedy(20))})
    assert engine.close()
    stats = engine.stats().disk_tier
    assert stats is not None and engine.thread.failure is None


@pytest.mark.parametrize(
    ("method", "answer", "message"),
    [
        ("has", raises(OSError("out")), "a block could not be looked up: OSError: out"),
        ("load", raises(SystemExit(3)), "a block could not be read: SystemExit: 3"),
        ("load", lambda *_: "text", "a block could not be read: load returned a str"),
        ("store", lambda *_: 1.5, "a block could not be written: store returned a float"),
    ],
)
def test_the_failure_of_a_tier_is_said_once(
    model: qwen3.Model, monkeypatch: pytest.MonkeyPatch, method: str, answer: Any, message: str
):
    tier, told = DictTier(), prompt(100)
    filling = make_engine(model, tier=lambda _: tier)
    ask(filling, {"a": (told, greedy(20))})
    assert filling.close()
    monkeypatch.setattr(tier, method, answer)
    engine = make_engine(model, tier=lambda _: tier)
    with pytest.warns(UserWarning, match="from now on K/V are kept in memory only$") as said:
        for name, seed in (("a", 0), ("b", 1), ("c", 2)):
            ask(engine, {name: (prompt(100, seed=seed), greedy(5))})
            assert engine.disk_tier is not None and engine.disk_tier._worker.flush(60)
        ask(engine, {"d": (prompt(70, seed=3), greedy(5))})
    assert len(said) == 1 and message in str(said[0].message)


@pytest.mark.parametrize("damage", ["others", "cut", "flipped", "empty"])
def test_bytes_of_a_tier_that_are_not_those_of_the_block_are_a_miss(
    model: qwen3.Model, damage: str
):
    tier, told = DictTier(), prompt(100)
    expected = ask_alone(model, told, greedy(20))
    filling = make_engine(model, tier=lambda _: tier)
    ask(filling, {"a": (told, greedy(20))})
    assert filling.close()
    whole = dict(tier.blocks)
    keys, contents = list(whole), list(whole.values())
    for place, key in enumerate(keys):
        tier.blocks[key] = {
            "others": contents[place - 1],
            "cut": contents[place][:-1],
            "flipped": bytes([contents[place][0] ^ 1]) + contents[place][1:],
            "empty": b"",
        }[damage]
    for num_good in range(7):
        engine = make_engine(model, tier=lambda _: tier)
        engine.add_request("a", told, greedy(20))
        output = run(engine)["a"]
        assert output.outputs[0].token_ids == expected
        # What comes after the first miss is not looked at.
        assert output.num_read_tokens == 16 * num_good
        stats = engine.stats().disk_tier
        assert stats is not None and stats.num_corrupt_blocks == (num_good < 6)
        assert engine.close() and stats.failure is None
    assert tier.blocks.keys() == whole.keys(), "what was damaged was written again"


def swapping_engine(model: qwen3.Model, tier: Tier, **options: Any) -> Engine:
    engine = make_engine(
        model,
        kv_cache_bytes="8blocks",
        swap_bytes="8blocks",
        max_num_seqs=2,
        watermark=0,
        **options,
    )
    engine.swap_space.tier = tier
    return engine


class Forgets(DictTier):
    """Loses the blocks that it is asked for."""

    def load(self, key: bytes) -> bytes | None:
        self.blocks.pop(key, None)
        return super().load(key)


class Confuses(DictTier):
    """Answers with the bytes of another block."""

    def load(self, key: bytes) -> bytes | None:
        self.num_loads += 1
        others = [content for each, content in self.blocks.items() if each != key]
        return others[0] if others else None


class Exits(DictTier):
    def load(self, key: bytes) -> bytes | None:
        self.num_loads += 1
        raise SystemExit(3)


class Refuses(DictTier):
    def store(self, header: BlockHeader, content: Payload) -> bool:
        raise MemoryError("full")


@pytest.mark.filterwarnings("ignore:.*computed again")
@pytest.mark.parametrize("prefixes", [True, False])
@pytest.mark.parametrize("make_tier", [Forgets, Confuses, Exits, Refuses])
def test_swapped_blocks_that_are_lost_are_computed_again(
    model: qwen3.Model, make_tier: Callable[[], DictTier], prefixes: bool
):
    tier = make_tier()
    engine = swapping_engine(model, tier, enable_prefix_caching=prefixes)
    requests = {name: (prompt(n), greedy(60)) for name, n in (("first", 40), ("second", 41))}
    answers = ask(engine, requests)
    assert engine.stats().num_preemptions > 0
    assert tier.num_loads > 0 or make_tier is Refuses
    for name, (tokens, params) in requests.items():
        assert answers[name] == ask_alone(model, tokens, params)
    assert engine.stats().num_swapped_tokens == 0


def test_what_is_no_tier_is_refused_by_name(model: qwen3.Model, tmp_path: Path):
    for options, message in (
        ({"tier": "there"}, "tier must be a function that returns a Tier, got 'there'"),
        ({"tier": lambda _: {}}, "tier must be a function that returns a Tier, it returned {}"),
        ({"tier": DictTier, "cache_dir": tmp_path}, "tier replaces cache_dir"),
        ({"tier": lambda _: DictTier(), "kv": "basic"}, "tier needs blocks, which kv='basic'"),
    ):
        with pytest.raises(ArgumentError, match=message) as refusal:
            make_engine(model, **options)
        assert refusal.value.argument == "tier"
