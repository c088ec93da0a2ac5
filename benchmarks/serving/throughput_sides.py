"""Who serves the requests in `throughput.py`: our engine, mlx-lm's BatchGenerator, mlx-lm one
request after another.

A side is made fresh for every run. How each counts its K/V:

- `nbytes_held`: K/V arrays that exist between two steps. Ours: the slabs. Theirs:
  `prompt_cache_nbytes`, all arrays of all its caches. Temporaries and copies under way are in
  neither; `throughput.py` reads those from MLX's allocator.
- `num_slots`: places for a token that are reserved for sequences. Ours: blocks in use * block_size,
  shared ones once. Theirs: batch * allocated length of every BatchKVCache, where the length is the
  longest sequence's plus what an allocation is rounded up by (256 tokens), and all others are
  padded on the left to the longest.
- `num_filled_slots`: those with a token's K/V in them. Ours: `num_slots - num_unfilled_slots`.
  Theirs: the sum of tokens that BatchGenerator keeps for every sequence in them, the ones of the
  step under way with them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.cache import LRUPromptCache, make_prompt_cache

from benchmarks.serving.throughput_scenarios import SampleRequest, Scenario

OURS, THEIRS, ONE_BY_ONE = "mlx_paged", "mlx-lm", "mlx-lm one by one"

BLOCK_SIZE = 16
# BatchGenerator's own defaults; ours runs as many sequences at once.
COMPLETION_BATCH_SIZE = 32
PREFILL_BATCH_SIZE = 8
PREFILL_STEP_SIZE = 2048


@dataclass(frozen=True)
class KVUse:
    nbytes_held: int
    num_slots: int
    num_filled_slots: int


class Side(Protocol):
    def add(self, request: SampleRequest) -> None: ...

    def step(self) -> list[tuple[str, int]]:
        """One step of its own; the tokens it gave out, with the requests they belong to."""
        ...

    def kv_use(self) -> KVUse: ...

    def notes(self) -> dict[str, Any]:
        """What else this side can say of its run."""
        ...


def kv_nbytes_per_token(model: nn.Module) -> int:
    args = model.args
    weight = model.layers[0].self_attn.q_norm.weight
    num_numbers: int = 2 * args.num_hidden_layers * args.num_key_value_heads * args.head_dim
    itemsize: int = weight.dtype.size
    return num_numbers * itemsize


def pool_nbytes(scenario: Scenario, model: nn.Module) -> int:
    return scenario.num_pool_tokens(COMPLETION_BATCH_SIZE, BLOCK_SIZE) * kv_nbytes_per_token(model)


class PagedEngine:
    """Ours, at its defaults but for ``options``."""

    def __init__(self, model: nn.Module, scenario: Scenario, **options: Any):
        from mlx_paged.engine.engine import Engine

        if "kv_cache_bytes" not in options:
            options["kv_cache_bytes"] = pool_nbytes(scenario, model)
        options = {"block_size": BLOCK_SIZE, "max_num_seqs": COMPLETION_BATCH_SIZE} | options
        self.engine = Engine(model, None, **options)
        self.num_given: dict[str, int] = {}

    def add(self, request: SampleRequest) -> None:
        from mlx_paged.options.sampling_params import SamplingParams

        params = SamplingParams(
            max_tokens=request.max_tokens,
            ignore_eos=True,
            logits_processors=request.logits_processors,
        )
        self.engine.add_request(request.request_id, request.prompt_token_ids, params)

    def step(self) -> list[tuple[str, int]]:
        given = []
        for output in self.engine.step():
            output.raise_if_failed()
            token_ids = output.outputs[0].token_ids
            start = self.num_given.get(output.request_id, 0)
            given += [(output.request_id, token) for token in token_ids[start:]]
            self.num_given[output.request_id] = len(token_ids)
        return given

    def kv_use(self) -> KVUse:
        stats = self.engine.stats()
        num_slots = stats.num_used_blocks * BLOCK_SIZE
        return KVUse(self.engine.cache.nbytes_held, num_slots, num_slots - stats.num_unfilled_slots)

    def notes(self) -> dict[str, Any]:
        stats = self.engine.stats()
        names = ("num_preemptions", "num_hit_tokens", "num_queried_tokens", "num_evictions")
        return {name: getattr(stats, name) for name in names}


class MlxLmBatch:
    """mlx-lm's BatchGenerator at its defaults, which has no budget and shares no prefixes."""

    def __init__(
        self,
        model: nn.Module,
        scenario: Scenario,
        completion_batch_size: int = COMPLETION_BATCH_SIZE,
        prefill_batch_size: int = PREFILL_BATCH_SIZE,
    ):
        self.completion_batch_size = completion_batch_size
        self.generator = BatchGenerator(
            model,
            completion_batch_size=completion_batch_size,
            prefill_batch_size=prefill_batch_size,
            prefill_step_size=PREFILL_STEP_SIZE,
        )
        self.request_ids: dict[int, str] = {}

    def add(self, request: SampleRequest) -> None:
        self._insert(request, 0, None)

    def _insert(self, request: SampleRequest, num_cached: int, cache: list[Any] | None) -> None:
        cached, rest = request.prompt_token_ids[:num_cached], request.prompt_token_ids[num_cached:]
        caches: list[Any] = [cache]  # mlx-lm takes None in it, its annotation does not
        (uid,) = self.generator.insert(
            [rest],
            [request.max_tokens],
            caches=caches,
            all_tokens=[cached],
            logits_processors=[list(request.logits_processors)],
        )
        self.request_ids[uid] = request.request_id

    def step(self) -> list[tuple[str, int]]:
        return [(self.request_ids[response.uid], response.token) for response in self._generate()]

    def _generate(self) -> list[Any]:
        responses: list[Any]
        _, responses = self.generator.next()
        return responses

    def kv_use(self) -> KVUse:
        generator = self.generator
        prompts, answers = (
            generator._prompt_batch,
            generator._generation_batch,
        )  # no public way leads to these
        # All layers are alike: the first one's shape stands for all.
        in_batches = [batch.prompt_cache[0] for batch in (prompts, answers) if batch.prompt_cache]
        waiting = [sequence[3][0] for sequence in generator._unprocessed_sequences]
        shapes = [cache.keys.shape for cache in (*in_batches, *waiting) if cache.keys is not None]
        num_waiting = sum(cache.offset for cache in waiting)
        num_filled = sum(map(len, (*prompts.tokens, *answers.tokens))) + num_waiting
        return KVUse(
            generator.prompt_cache_nbytes, sum(shape[0] * shape[2] for shape in shapes), num_filled
        )

    def notes(self) -> dict[str, Any]:
        counters = self.generator._counters
        return {
            "completion_batch_size": self.completion_batch_size,
            "prompt_seconds": counters.prompt_time,
            "decode_seconds": counters.decode_time,
            "decode_steps": counters.generation_steps,
        }


class MlxLmWithPromptCache(MlxLmBatch):
    """The same with mlx-lm's LRUPromptCache before it, used as mlx_lm.server does.

    Each request gets a copy of the longest prefix that was seen. Keeps the first request it serves
    and no other.
    """

    def __init__(self, model: nn.Module, scenario: Scenario):
        super().__init__(model, scenario)
        self.seen = LRUPromptCache()
        self.first: tuple[list[int], list[Any]] | None = None  # the tokens and the cache it keeps

    def add(self, request: SampleRequest) -> None:
        cache, rest = self.seen.fetch_nearest_cache("model", request.prompt_token_ids)
        self._insert(request, len(request.prompt_token_ids) - len(rest), cache)

    def _generate(self) -> list[Any]:
        responses = super()._generate()
        for response in responses:
            if response.finish_reason is not None and self.first is None:
                self.first = response.all_tokens, response.prompt_cache
                self.seen.insert_cache("model", *self.first)
        return responses


class MlxLmInBudget(MlxLmBatch):
    """The same with so few sequences at once that our pool's bytes would hold the longest request
    in every place.
    """

    def __init__(self, model: nn.Module, scenario: Scenario):
        longest = max(request.num_tokens for request in scenario.requests) + 256
        num_seqs = max(1, pool_nbytes(scenario, model) // (longest * kv_nbytes_per_token(model)))
        super().__init__(model, scenario, num_seqs, min(num_seqs, PREFILL_BATCH_SIZE))


class MlxLmOneByOne:
    """mlx-lm without batching: its generate_step, one request after another as they came."""

    def __init__(self, model: nn.Module, scenario: Scenario):
        self.model = model
        self.waiting: deque[SampleRequest] = deque()
        self.cache: list[Any] = []
        self.request_id = ""
        self.tokens: Any = iter(())

    def add(self, request: SampleRequest) -> None:
        self.waiting.append(request)

    def step(self) -> list[tuple[str, int]]:
        token = next(self.tokens, None)
        if token is None:
            request = self.waiting.popleft()
            self.request_id = request.request_id
            self.cache = make_prompt_cache(self.model)
            prompt = mx.array(request.prompt_token_ids)
            self.tokens = generate_step(
                prompt, self.model, max_tokens=request.max_tokens, prompt_cache=self.cache
            )
            token = next(self.tokens)
        return [(self.request_id, token[0])]

    def kv_use(self) -> KVUse:
        num_slots = self.cache[0].keys.shape[2] if self.cache else 0
        num_filled = self.cache[0].offset if self.cache else 0
        return KVUse(sum(cache.nbytes for cache in self.cache), num_slots, num_filled)

    def notes(self) -> dict[str, Any]:
        return {}


SIDES = {
    OURS: PagedEngine,
    THEIRS: MlxLmBatch,
    ONE_BY_ONE: MlxLmOneByOne,
    "mlx-lm + prompt cache": MlxLmWithPromptCache,
    "mlx-lm in the budget": MlxLmInBudget,
}
