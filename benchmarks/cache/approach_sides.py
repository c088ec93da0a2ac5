"""The approaches that `approaches.py` compares: ways to keep K/V, all on the same weights.

An approach makes fresh sides, as `throughput_sides.py` has them, and says what of them outlives the
process. Ours differ in the options of the engine and in nothing else.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache, trim_prompt_cache

from benchmarks.serving.throughput_scenarios import SampleRequest, Scenario
from benchmarks.serving.throughput_sides import (
    BLOCK_SIZE,
    COMPLETION_BATCH_SIZE,
    KVUse,
    MlxLmBatch,
    MlxLmWithPromptCache,
    PagedEngine,
    Side,
)
from mlx_paged import make_kv_cache

THEIRS = "mlx-lm"
NO_CACHE = "no cache"
PAGED = "paged"
DISK_TIER = "sharing, disk tier"
WINDOW = "sharing, window and sinks"


@dataclass(frozen=True)
class Bound:
    """How far a lossy approach may be from the exact ones, teacher-forced on held-out text."""

    perplexity_change: float  # relative, either way
    same_choice: float  # the least share of places with the same most likely token


class Approach(Protocol):
    name: str
    is_exact: bool
    """Whether it should give mlx-lm's tokens."""
    bound: Bound | None
    """Of one that should not; ``None`` bounds nothing."""
    survives: bool
    """Whether a prefix outlives the process."""
    keeps_prefixes: bool
    """Whether the prefixes of many requests are found again."""

    def start(self, scenario: Scenario) -> Side:
        """A fresh side that knows nothing."""
        ...

    def end(self, side: Side) -> None:
        """The side ends, as a program does."""
        ...

    def restart(self, scenario: Scenario) -> Side:
        """A side that has what the last one that ended left behind."""
        ...


@dataclass
class Ours:
    """An engine with these options."""

    name: str
    model: nn.Module
    options: Mapping[str, Any] = field(default_factory=dict)
    is_exact: bool = True
    bound: Bound | None = None
    folder: Path | None = None  # where the disk tier of this approach has its folders
    survives: bool = field(init=False)
    keeps_prefixes: bool = field(init=False)

    def __post_init__(self) -> None:
        self.survives = self.folder is not None
        self.keeps_prefixes = self.options.get("enable_prefix_caching", True)
        self._num_folders = itertools.count()
        self._cache_dir: Path | None = None

    def start(self, scenario: Scenario) -> Side:
        if self.folder is not None:
            self._cache_dir = self.folder / str(next(self._num_folders))
        return self.restart(scenario)

    def restart(self, scenario: Scenario) -> Side:
        num_tokens = scenario.num_pool_tokens(COMPLETION_BATCH_SIZE, BLOCK_SIZE)
        # Bytes that are enough for dense K/V: others hold less and need no more.
        return self.with_budget(num_tokens * nbytes_per_token(self.model))

    def with_budget(self, nbytes: int) -> PagedEngine:
        where = {} if self._cache_dir is None else {"cache_dir": str(self._cache_dir)}
        scenario = Scenario(0, "", "", [])  # asked for nothing, as the budget is given
        options = {"kv_cache_bytes": nbytes, **self.options, **where}
        return PagedEngine(self.model, scenario, **options)

    def end(self, side: Side) -> None:
        assert isinstance(side, PagedEngine)
        if self._cache_dir is not None:
            side.engine.close(timeout=60)


@dataclass
class MlxLm:
    """mlx-lm's BatchGenerator behind its prompt cache, as its server runs them; over a restart, its
    prompt cache in a file, as its command line keeps one.
    """

    model: nn.Module
    ours: nn.Module  # the same weights; it knows what a token's K/V take
    folder: Path
    name: str = THEIRS
    is_exact: bool = True
    bound: Bound | None = None
    survives: bool = True
    keeps_prefixes: bool = False  # a side keeps its first one

    @property
    def path(self) -> Path:
        return self.folder / "prompt_cache.safetensors"

    def start(self, scenario: Scenario) -> Side:
        return MlxLmWithPromptCache(self.model, scenario)

    def end(self, side: Side) -> None:
        if isinstance(side, MlxLmWithPromptCache) and side.first is not None:
            token_ids, cache = side.first
            save_prompt_cache(str(self.path), cache, {"tokens": json.dumps(token_ids)})

    def restart(self, scenario: Scenario) -> Side:
        return MlxLmFromFile(self.model, scenario, self.path)


class MlxLmFromFile(MlxLmBatch):
    """A BatchGenerator whose requests begin with a prompt cache that is read from a file."""

    def __init__(self, model: nn.Module, scenario: Scenario, path: Path):
        super().__init__(model, scenario)
        self.path = path

    def add(self, request: SampleRequest) -> None:
        cache, metadata = load_prompt_cache(str(self.path), return_metadata=True)
        held, prompt = json.loads(metadata["tokens"]), request.prompt_token_ids
        pairs = zip(held, prompt[:-1], strict=False)
        num_cached = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        trim_prompt_cache(cache, len(held) - num_cached)
        self._insert(request, num_cached, cache)


@dataclass
class NoCache:
    """Each token computes everything before it once more: mlx-lm's model, called without a cache.

    Requests of one length are one batch.
    """

    model: nn.Module
    name: str = NO_CACHE
    is_exact: bool = True
    bound: Bound | None = None
    survives: bool = False
    keeps_prefixes: bool = False

    def start(self, scenario: Scenario) -> Side:
        return WithoutCache(self.model)

    restart = start

    def end(self, side: Side) -> None:
        pass


class WithoutCache:
    def __init__(self, model: nn.Module):
        self.model = model
        self.running: list[tuple[SampleRequest, list[int]]] = []  # with the tokens so far

    def add(self, request: SampleRequest) -> None:
        self.running.append((request, list(request.prompt_token_ids)))

    def step(self) -> list[tuple[str, int]]:
        by_length: dict[int, list[tuple[SampleRequest, list[int]]]] = {}
        for each in self.running:
            by_length.setdefault(len(each[1]), []).append(each)
        given: list[tuple[str, int]] = []
        for batch in by_length.values():
            logits = self.model(mx.array([token_ids for _, token_ids in batch]))[:, -1]
            rows = [
                _processed(request, token_ids, logits[row : row + 1])
                for row, (request, token_ids) in enumerate(batch)
            ]
            drawn: list[int] = mx.concatenate(rows).argmax(-1).tolist()  # type: ignore[assignment]
            for (request, token_ids), token in zip(batch, drawn, strict=True):
                token_ids.append(token)
                given.append((request.request_id, token))
        self.running = [each for each in self.running if len(each[1]) < each[0].num_tokens]
        return given

    def kv_use(self) -> KVUse:
        return KVUse(0, 0, 0)

    def notes(self) -> dict[str, Any]:
        return {}


def _processed(request: SampleRequest, token_ids: list[int], row: mx.array) -> mx.array:
    for processor in request.logits_processors:
        row = processor(mx.array(token_ids), row)
    return row


def nbytes_per_token(model: nn.Module) -> int:
    """Of dense K/V in the model's dtype."""
    return make_kv_cache(model, kv_cache_bytes="1block").config.nbytes_per_token


def make_approaches(
    ours: nn.Module, theirs: nn.Module, folder: Path, window: int
) -> dict[str, Approach]:
    """All of them, by name, in the order of the table.

    Args:
        ours, theirs: the same weights, as this package and as mlx-lm run them.
        folder: for what outlives a process.
        window: tokens of the sliding window.
    """
    engines = [
        Ours("contiguous", ours, {"kv": "basic", "enable_prefix_caching": False}),
        Ours(PAGED, ours, {"enable_prefix_caching": False}),
        Ours("prefix sharing", ours),
        Ours("sharing, 8 bits", ours, {"kv_format": 8}, False, Bound(0.005, 0.98)),
        Ours("sharing, K8V4", ours, {"kv_format": "K:8,V:4"}, False, Bound(0.02, 0.95)),
        Ours("sharing, 4 bits", ours, {"kv_format": 4}, False, Bound(0.05, 0.93)),
        Ours(WINDOW, ours, {"window": window, "num_sink_tokens": 4}, False),
        Ours("sharing, speculation", ours, {"num_draft_tokens": 7}),
        Ours(DISK_TIER, ours, folder=folder / "disk tier"),
    ]
    made: list[Approach] = [NoCache(theirs), *engines, MlxLm(theirs, ours, folder)]
    return {approach.name: approach for approach in made}
