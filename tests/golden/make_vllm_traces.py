"""Record the golden traces of vLLM's KV cache manager, `tests/golden/vllm_traces/<scenario>.json`.

This needs vLLM 0.33.0, which no extra installs. The files are committed, and the ordinary tests
read only them (`tests/golden/vllm_calls.py` loads and explains them). vLLM's manager needs no GPU:

    pip install --no-deps vllm==0.33.0    # and torch for a CPU, and what the imports below ask for
    python tests/golden/make_vllm_traces.py

Every scenario drives the manager as vLLM's own scheduler does: running requests first, in order of
arrival, the newest one preempted when blocks run out, then waiting ones until one is refused.
Prefix caching is on, there is one group of full attention layers, and there is no speculation,
connector or watermark. The same seeds give the same files.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable

import torch
import vllm
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    maybe_convert_block_hash,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request
from vllm_calls import (
    TRACE_DIR,
    AddRequest,
    AllocateSlots,
    AppendTokens,
    Call,
    FreeRequest,
    GetComputedBlocks,
    ResetPrefixCache,
    content_name,
)

VLLM_VERSION = "0.33.0"
MAX_MODEL_LEN = 1 << 16
LORAS = {"sql": 1, "poet": 2}


class Recorder:
    """vLLM's manager; every call to it is recorded with its outcome."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.calls: list[Call] = []
        self.names: dict[int | bytes, str] = {}
        """{hash in vLLM's events: content name}."""
        self._hits: dict[str, tuple[KVCacheBlocks, int]] = {}
        spec = FullAttentionSpec(
            block_size=block_size, num_kv_heads=1, head_size=8, dtype=torch.float32
        )
        self.manager = KVCacheManager(
            KVCacheConfig(
                num_blocks=num_blocks,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["0"], spec)],
            ),
            max_model_len=MAX_MODEL_LEN,
            scheduler_block_size=block_size,
            hash_block_size=block_size,
            enable_caching=True,
            enable_kv_cache_events=True,
        )

    def add(
        self,
        request_id: str,
        token_ids: list[int],
        lora: str | None = None,
        cache_salt: str | None = None,
    ) -> Request:
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(token_ids),
            sampling_params=SamplingParams(max_tokens=MAX_MODEL_LEN),
            pooling_params=None,
            arrival_time=0.0,
            lora_request=LoRARequest(lora, LORAS[lora], f"adapters/{lora}") if lora else None,
            cache_salt=cache_salt,
            block_hasher=get_request_block_hasher(self.block_size, sha256),
        )
        self._name_contents(request)
        self._record(
            AddRequest, request, token_ids=list(token_ids), lora=lora, cache_salt=cache_salt
        )
        return request

    def get(self, request: Request) -> int:
        blocks, num_tokens, _ = self.manager.get_computed_blocks(request)
        self._hits[request.request_id] = blocks, num_tokens
        self._record(GetComputedBlocks, request, hit=num_tokens)
        return num_tokens

    def allocate(
        self, request: Request, num_new_tokens: int, full_sequence_must_fit: bool = False
    ) -> bool:
        """Allocate with the hit of the `get` just before, if there was one."""
        blocks, num_computed_tokens = self._hits.pop(request.request_id, (None, 0))
        new_blocks = self.manager.allocate_slots(
            request,
            num_new_tokens,
            num_new_computed_tokens=num_computed_tokens,
            new_computed_blocks=blocks,
            full_sequence_must_fit=full_sequence_must_fit,
        )
        if new_blocks is not None:
            request.num_computed_tokens += num_computed_tokens + num_new_tokens
        evicted: list[str] = []
        stored: list[str] = []
        for event in self.manager.take_events():
            names = [self.names[block_hash] for block_hash in event.block_hashes]
            {BlockRemoved: evicted, BlockStored: stored}[type(event)].extend(names)
        self._record(
            AllocateSlots,
            request,
            num_new_tokens=num_new_tokens,
            num_new_computed_tokens=num_computed_tokens,
            full_sequence_must_fit=full_sequence_must_fit,
            refused=new_blocks is None,
            blocks=len(self.manager.get_block_ids(request.request_id)[0]),
            evicted=evicted,
            stored=stored,
        )
        return new_blocks is not None

    def append(self, request: Request, token_ids: list[int]) -> None:
        request.append_output_token_ids(token_ids)
        self._name_contents(request)
        self._record(AppendTokens, request, token_ids=token_ids)

    def free(self, request: Request, reason: str) -> None:
        self.manager.free(request)
        request.num_computed_tokens = 0
        self._record(FreeRequest, request, reason=reason)

    def reset(self) -> bool:
        done = self.manager.reset_prefix_cache()
        self.manager.take_events()
        self._record(ResetPrefixCache, None, done=done)
        return done

    def run(self, request: Request, chunk: int = MAX_MODEL_LEN, num_outputs: int = 0) -> None:
        """Prefill in chunks and decode `num_outputs` tokens, which must fit."""
        left = request.num_tokens - self.get(request)
        while left:
            assert self.allocate(request, min(left, chunk))
            left = request.num_tokens - request.num_computed_tokens
            if not left and num_outputs:
                self.append(request, [greedy_token(list(request.all_token_ids))])
                num_outputs, left = num_outputs - 1, 1 if num_outputs > 1 else 0

    def drain(self) -> None:
        """Evict all that is cached, in order."""
        num_tokens = (self.num_blocks - 1) * self.block_size
        self.run(self.add("drain", list(range(1000, 1000 + num_tokens))))
        assert self.manager.block_pool.get_num_free_blocks() == 0

    def _name_contents(self, request: Request) -> None:
        token_ids = list(request.all_token_ids)
        for index, block_hash in enumerate(request.block_hashes):
            key = maybe_convert_block_hash(block_hash)
            if key not in self.names:
                self.names[key] = content_name(
                    token_ids[: (index + 1) * self.block_size], *context_of(request)
                )

    def _record(self, kind: type[Call], request: Request | None, **fields: object) -> None:
        assert not self.manager.take_events(), "only an allocation stores and evicts"
        pool = self.manager.block_pool
        self.calls.append(
            kind(
                request=request.request_id if request else "",
                free=pool.get_num_free_blocks(),
                usage=round(self.manager.usage, 6),
                cached=len(pool.cached_block_hash_to_block),
                **fields,
            )
        )


def context_of(request: Request) -> tuple[str | None, str | None]:
    return request.lora_request.lora_name if request.lora_request else None, request.cache_salt


def greedy_token(token_ids: list[int]) -> int:
    """What "the model" says next: the same after the same tokens."""
    return (31 * sum(token_ids[-5:]) + 7 * len(token_ids)) % 97


# Made by hand


def basics(recorder: Recorder) -> None:
    prompt = list(range(1, 11))
    first = recorder.add("first", prompt)  # 2 full blocks of 4, and 2 tokens
    recorder.run(first, num_outputs=4)  # the 4th token sampled is never computed
    second = recorder.add("second", prompt)  # same prompt, while the first runs
    recorder.run(second, chunk=3)
    aligned = recorder.add(
        "aligned", prompt[:8]
    )  # all found, but one token must be computed: one block less
    recorder.run(aligned)
    for request in (first, aligned, second):
        recorder.free(request, "finished")
    again = recorder.add(
        "again", [*first.all_token_ids, 90, 91]
    )  # next turn: prompt, answer, and more
    recorder.run(again, chunk=1, num_outputs=2)
    recorder.free(again, "preempted")
    recorder.run(again, num_outputs=1)  # finds its own prompt and outputs
    recorder.free(again, "preempted")
    never = recorder.add("never", [5, 5, 5, 5, 5])
    recorder.get(never)  # a lookup alone takes nothing
    recorder.free(never, "aborted")
    shortest = recorder.add("shortest", [1])
    recorder.run(shortest)
    recorder.free(shortest, "finished")
    recorder.run(again, chunk=5)
    recorder.free(again, "finished")


def free_hits_count(recorder: Recorder) -> None:
    """7 usable blocks of 4."""
    prompt = list(range(1, 17))
    old = recorder.add("old", prompt)
    recorder.run(old)
    recorder.free(old, "finished")  # 4 cached blocks, all free
    holder = recorder.add("holder", list(range(50, 58)))
    recorder.run(holder)  # 2 held; free: 4 cached, 1 empty
    long = recorder.add("long", [*prompt, *range(20, 28)])  # 6 blocks; 4 found in the free queue
    hit = recorder.get(long)
    assert hit == 16
    assert not recorder.allocate(long, 8)  # 2 new blocks, 5 free, but 4 of these are the hit itself
    assert recorder.get(long) == 16  # and nothing was touched
    assert recorder.allocate(long, 4)  # one chunk fits exactly: nothing is left
    assert not recorder.allocate(long, 4)
    recorder.append(holder, [3])
    assert not recorder.allocate(holder, 1)
    recorder.free(long, "preempted")
    assert recorder.allocate(holder, 1)  # takes the tail of what was freed: the end of `long`
    fits = recorder.add(
        "fits", prompt[:9]
    )  # a hit in the free queue: what lies behind it is evicted
    recorder.run(fits)
    shared = recorder.add(
        "shared", prompt[:9]
    )  # a hit that is held costs nothing: one block is enough
    assert recorder.get(shared) == 8
    assert recorder.allocate(shared, 1)
    recorder.get(long)
    assert not recorder.allocate(long, 8, full_sequence_must_fit=True)
    for request in (holder, shared, fits):
        recorder.free(request, "finished")
    recorder.get(long)
    assert recorder.allocate(long, 1, full_sequence_must_fit=True)
    recorder.free(long, "finished")
    far = recorder.add("far", list(range(60, 93)))  # 9 blocks: never
    recorder.get(far)
    assert not recorder.allocate(far, 8, full_sequence_must_fit=True)
    recorder.get(far)
    assert recorder.allocate(far, 28)  # but as much of it as there is
    assert not recorder.allocate(far, 5)
    recorder.free(far, "aborted")
    recorder.free(recorder.add("idle", prompt), "aborted")  # holds nothing


def duplicates(recorder: Recorder) -> None:
    """11 usable blocks of 4: the same content in more than one block."""
    prompt = list(range(1, 9))
    one, two, three = (recorder.add(name, prompt) for name in ("one", "two", "three"))
    recorder.run(one, num_outputs=5)
    recorder.run(
        two, num_outputs=5
    )  # finds the first block, computes the two others once more: all are in the index
    recorder.run(three, num_outputs=5)
    recorder.free(one, "finished")  # the copies that entered first
    wide = recorder.add("wide", list(range(30, 50)))
    recorder.run(wide)  # evicts the last of them
    recorder.run(
        narrow := recorder.add("narrow", list(range(50, 54)))
    )  # and the other; copies stay findable
    recorder.free(wide, "finished")
    asks = recorder.add("asks", [*three.all_token_ids[:12], 70])
    assert recorder.get(asks) == 12
    assert recorder.allocate(asks, 1)
    recorder.free(two, "finished")  # `asks` holds the copies of `two`
    recorder.free(asks, "finished")
    recorder.free(three, "finished")
    recorder.run(last := recorder.add("last", prompt))
    recorder.free(last, "finished")
    recorder.get(recorder.add("looks", [*prompt, *range(60, 70)]))
    recorder.free(narrow, "finished")


def contexts_and_reset(recorder: Recorder) -> None:
    """13 usable blocks of 4."""
    prompt = [7, 7, 7, 7, 8, 8, 8, 8, 9]
    contexts = [(None, None), ("sql", None), ("poet", None), (None, "a"), (None, "b"), ("sql", "a")]
    held = []
    for round_number in range(2):
        for lora, cache_salt in contexts:
            name = f"{lora or 'base'}-{cache_salt or 'none'}-{round_number}"
            request = recorder.add(name, prompt, lora, cache_salt)
            num_new_tokens = request.num_tokens - recorder.get(request)
            if recorder.allocate(request, num_new_tokens):
                held.append(request)
            if len(held) == 3:
                recorder.reset()  # refused: blocks are held
                recorder.free(held.pop(0), "finished")
    while held:
        recorder.free(held.pop(), "finished")
    for lora, cache_salt in contexts:
        recorder.get(
            recorder.add(f"{lora or 'base'}-{cache_salt or 'none'}-look", prompt, lora, cache_salt)
        )
    assert recorder.reset()
    assert recorder.reset()  # once more, of nothing
    after = recorder.add("after", prompt)
    recorder.run(after, num_outputs=2)
    assert not recorder.reset()
    assert recorder.get(recorder.add("after-2", prompt)) == 8
    recorder.free(after, "finished")


# Random


@dataclasses.dataclass(kw_only=True)
class Traffic:
    """The properties of a random scenario; probabilities are per step."""

    seed: int
    num_calls: int
    prompt_tokens: tuple[int, int]
    """The least and the most tokens of a prompt's own, which follow those that it shares."""
    system_tokens: tuple[int, ...]
    """Lengths of the shared beginnings."""
    outputs: tuple[int, int]
    token_budget: int
    chunk: int = MAX_MODEL_LEN
    arrivals: float = 0.4
    max_running: int = 8
    contexts: tuple[tuple[str | None, str | None], ...] = ((None, None),)
    come_again: float = 0.4
    """Share of prompts that continue an earlier request, all of it or its beginning."""
    repeats: float = 0.15
    """Share of prompts that repeat the one of a request that is not yet finished."""
    aborts: float = 0.02
    preemptions: float = 0.02
    resets: float = 0.0
    full_sequence_must_fit: bool = False


class Driver:
    """A small scheduler: first come, first served; the newest request is preempted."""

    def __init__(self, recorder: Recorder, traffic: Traffic) -> None:
        self.recorder = recorder
        self.traffic = traffic
        self.rng = rng = random.Random(traffic.seed)
        self.systems = [
            [rng.randrange(97) for _ in range(length)] for length in traffic.system_tokens
        ]
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.histories: list[tuple[list[int], str | None, str | None]] = []
        self.num_requests = 0
        self.num_outputs: dict[str, int] = {}

    def run(self) -> None:
        while len(self.recorder.calls) < self.traffic.num_calls:
            self.step()
        for request in [*self.running[::-1], *self.waiting]:
            self.recorder.free(request, "aborted")

    def step(self) -> None:
        rng, traffic = self.rng, self.traffic
        while rng.random() < traffic.arrivals and len(self.waiting) < 5:
            self.arrive()
        if rng.random() < traffic.aborts and self.running + self.waiting:
            self.leave(rng.choice(self.running + self.waiting), "aborted")
        if rng.random() < traffic.preemptions and self.running:
            self.preempt(rng.choice(self.running))
        if rng.random() < traffic.resets:
            if rng.random() < 0.5:
                while self.running:  # As vLLM's scheduler does with `reset_running_requests`.
                    self.preempt(self.running[-1])
            self.recorder.reset()
        self.budget = traffic.token_budget
        if self.schedule_running():
            self.schedule_waiting()
        for request in [
            request for request in self.running if request.num_computed_tokens == request.num_tokens
        ]:
            if request.num_output_tokens >= self.num_outputs[request.request_id]:
                self.leave(request, "finished")
            else:
                token = (
                    greedy_token(list(request.all_token_ids))
                    if rng.random() < 0.9
                    else rng.randrange(97)
                )
                self.recorder.append(request, [token])

    def arrive(self) -> None:
        rng, traffic = self.rng, self.traffic
        lora, cache_salt = rng.choice(traffic.contexts)
        present = self.running + self.waiting
        if present and rng.random() < traffic.repeats:
            other = rng.choice(present)
            self.add(list(other.prompt_token_ids), *context_of(other))
            return
        if self.histories and rng.random() < traffic.come_again:
            tokens, lora, cache_salt = rng.choice(self.histories[-6:])
            if rng.random() < 0.3:
                tokens = tokens[: rng.randint(1, len(tokens))]
        else:
            tokens = rng.choice(self.systems)
        num_own = rng.randint(*traffic.prompt_tokens)
        tokens = [*tokens, *(rng.randrange(97) for _ in range(num_own))]
        # One in twenty is too long for the pool, whatever is free.
        limit = (self.recorder.num_blocks - 1) * self.recorder.block_size - traffic.outputs[1]
        if rng.random() < 0.95:
            tokens = tokens[:limit]
        self.add(tokens, lora, cache_salt)

    def add(self, tokens: list[int], lora: str | None, cache_salt: str | None) -> None:
        request = self.recorder.add(f"r{self.num_requests}", tokens, lora, cache_salt)
        self.num_requests += 1
        self.num_outputs[request.request_id] = self.rng.randint(*self.traffic.outputs)
        self.waiting.append(request)

    def schedule_running(self) -> bool:
        """False if a request had to be preempted: none is admitted then."""
        index = 0
        has_preempted = False
        while index < len(self.running) and self.budget:
            request = self.running[index]
            num_new_tokens = self.share(request.num_tokens - request.num_computed_tokens)
            while not self.recorder.allocate(request, num_new_tokens):
                newest = self.running[-1]
                if newest is request:
                    if index:
                        self.preempt(request)
                    else:
                        self.leave(request, "aborted")  # Alone, and it does not fit.
                    return False
                self.preempt(newest)
                has_preempted = True
            self.budget -= num_new_tokens
            index += 1
        return not has_preempted

    def schedule_waiting(self) -> None:
        while self.waiting and self.budget and len(self.running) < self.traffic.max_running:
            request = self.waiting[0]
            num_new_tokens = self.share(request.num_tokens - self.recorder.get(request))
            if not self.recorder.allocate(
                request, num_new_tokens, self.traffic.full_sequence_must_fit
            ):
                if not self.running:
                    self.leave(request, "aborted")  # It never fits.
                return
            self.running.append(self.waiting.pop(0))
            self.budget -= num_new_tokens

    def share(self, num_tokens: int) -> int:
        return min(num_tokens, self.budget, self.traffic.chunk)

    def preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.waiting.insert(0, request)
        self.recorder.free(request, "preempted")

    def leave(self, request: Request, reason: str) -> None:
        (self.running if request in self.running else self.waiting).remove(request)
        self.recorder.free(request, reason)
        if reason == "finished":
            self.histories.append((list(request.all_token_ids), *context_of(request)))


@dataclasses.dataclass
class Scenario:
    name: str
    num_blocks: int
    block_size: int
    about: str
    play: Callable[[Recorder], None] | Traffic


CONTEXTS = ((None, None), (None, "a"), (None, "b"), ("sql", None), ("sql", "a"))

SCENARIOS = [
    Scenario("basics", 12, 4, "shared prompts, chunks, decoding, preemption, a next turn", basics),
    Scenario(
        "free_hits_count",
        8,
        4,
        "refusals, because a hit in the free queue needs its blocks",
        free_hits_count,
    ),
    Scenario(
        "duplicates", 12, 4, "the same content in several blocks, evicted one by one", duplicates
    ),
    Scenario(
        "contexts_and_reset",
        14,
        4,
        "lora and cache_salt keep contexts apart; resets",
        contexts_and_reset,
    ),
    Scenario(
        "random_tiny_pool",
        8,
        4,
        "hardly room for two requests: refusals, evictions and preemptions in every other step",
        Traffic(
            seed=1,
            num_calls=500,
            prompt_tokens=(1, 8),
            system_tokens=(0, 4, 9),
            outputs=(1, 7),
            token_budget=24,
            arrivals=0.5,
        ),
    ),
    Scenario(
        "random_chunks",
        24,
        8,
        "prefill in chunks beside decodes, contexts kept apart, resets with and without preemption",
        Traffic(
            seed=2,
            num_calls=650,
            prompt_tokens=(3, 50),
            system_tokens=(8, 24, 37),
            outputs=(1, 12),
            token_budget=32,
            chunk=13,
            contexts=CONTEXTS,
            resets=0.06,
        ),
    ),
    Scenario(
        "random_must_fit",
        20,
        8,
        "admission with full_sequence_must_fit, chunks of up to 10 tokens",
        Traffic(
            seed=3,
            num_calls=600,
            prompt_tokens=(2, 60),
            system_tokens=(16, 20),
            outputs=(1, 10),
            token_budget=40,
            chunk=10,
            aborts=0.04,
            full_sequence_must_fit=True,
        ),
    ),
    Scenario(
        "random_conversations",
        64,
        16,
        "conversations in turns over shared system prompts",
        Traffic(
            seed=4,
            num_calls=1200,
            prompt_tokens=(4, 70),
            system_tokens=(64, 100, 0),
            outputs=(2, 12),
            token_budget=256,
            arrivals=0.6,
            max_running=12,
            come_again=0.7,
            contexts=((None, None), (None, None), (None, "a"), ("sql", None)),
        ),
    ),
]


def to_line(call: Call) -> str:
    fields = {"op": call.op}
    for field in dataclasses.fields(call):
        value = getattr(call, field.name)
        factory = field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory()
        if value != default:
            fields[field.name] = value
    for last in ("free", "usage", "cached"):
        fields[last] = fields.pop(last)
    return json.dumps(fields, separators=(",", ":"))


def make(scenario: Scenario) -> None:
    recorder = Recorder(scenario.num_blocks, scenario.block_size)
    if isinstance(scenario.play, Traffic):
        Driver(recorder, scenario.play).run()
    else:
        scenario.play(recorder)
    for request_id in sorted({call.request for call in recorder.calls if call.request}):
        if recorder.manager.get_block_ids(request_id)[0]:
            raise AssertionError(f"{scenario.name}: {request_id} still holds blocks")
    recorder.drain()

    head = {
        "vllm": VLLM_VERSION,
        "about": scenario.about,
        "num_blocks": scenario.num_blocks,
        "block_size": scenario.block_size,
    }
    lines = [f"{json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    lines += ['"calls": [', ",\n".join(map(to_line, recorder.calls)), "]"]
    path = TRACE_DIR / f"{scenario.name}.json"
    path.write_text("{\n" + "\n".join(lines) + "\n}\n", encoding="utf-8")

    allocations = [call for call in recorder.calls if isinstance(call, AllocateSlots)]
    hits = [call.hit for call in recorder.calls if isinstance(call, GetComputedBlocks)]
    counts = {
        "calls": len(recorder.calls),
        "allocations": len(allocations),
        "refused": sum(call.refused for call in allocations),
        "evicted": sum(len(call.evicted) for call in allocations),
        "of these by the drain": len(allocations[-1].evicted),
        "lookups": len(hits),
        "that hit": sum(hit > 0 for hit in hits),
        "tokens hit": sum(hits),
        "preempted": sum(
            isinstance(call, FreeRequest) and call.reason == "preempted" for call in recorder.calls
        ),
        "bytes": path.stat().st_size,
    }
    print(f"{scenario.name}:", ", ".join(f"{key} {count}" for key, count in counts.items()))


def main() -> None:
    if vllm.__version__ != VLLM_VERSION:
        raise SystemExit(f"This records vLLM {VLLM_VERSION}, installed is {vllm.__version__}")
    init_none_hash(sha256)
    TRACE_DIR.mkdir(exist_ok=True)
    for scenario in SCENARIOS:
        make(scenario)


if __name__ == "__main__":
    main()
