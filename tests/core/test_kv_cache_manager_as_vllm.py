"""Replays recorded calls of vLLM's v1 manager on ours: the counts, the refusals and the order of
evictions are the same.
"""

from __future__ import annotations

import pytest
from golden.vllm_calls import (
    TRACES,
    AddRequest,
    AllocateSlots,
    AppendTokens,
    FreeRequest,
    GetComputedBlocks,
    ResetPrefixCache,
    content_names,
    load_trace,
)
from paged_testing.integrity import check_manager

from mlx_paged.core import BlockPool, ComputedBlocks, KVCacheManager, extend_block_hashes


class Request:
    """A request as the driver knows it: its tokens, and the hit of its last lookup."""

    def __init__(self, call: AddRequest):
        self.extra_keys = (call.lora, call.cache_salt)
        self.token_ids: list[int] = []
        self.block_hashes: list = []
        self.computed = ComputedBlocks()


class Replay:
    """Runs the calls of a trace on our manager."""

    def __init__(self, num_blocks: int, block_size: int):
        self.manager = KVCacheManager(BlockPool(num_blocks, block_size))
        self.requests: dict[str, Request] = {}
        self.names: dict[bytes, str] = {}  # hash of a block: vLLM's name of its content
        self.evicted: list[str] = []
        uncache = self.manager.pool._uncache

        def record(block):
            self.evicted.append(self.names[block.block_hash])
            uncache(block)

        self.manager.pool._uncache = record

    def add_tokens(self, request: Request, token_ids: list[int]) -> None:
        block_size = self.manager.pool.block_size
        request.token_ids += token_ids
        extend_block_hashes(request.block_hashes, request.token_ids, block_size, request.extra_keys)
        names = content_names(request.token_ids, block_size, *request.extra_keys)
        self.names.update(zip(request.block_hashes, names, strict=True))

    def allocate(self, call: AllocateSlots) -> dict[str, object]:
        manager, request = self.manager, self.requests[call.request]
        self.evicted.clear()
        computed, request.computed = request.computed, ComputedBlocks()
        has_blocks = call.request in manager.tables
        num_cached_before = (
            manager.tables[call.request].num_cached_blocks if has_blocks else len(computed.blocks)
        )
        copies = None
        all_tokens = len(request.token_ids) - computed.num_tokens
        needed_by_all = manager.num_needed_blocks(call.request, all_tokens, computed)
        if not call.full_sequence_must_fit or needed_by_all <= manager.num_free_blocks:
            copies = manager.allocate_slots(call.request, call.num_new_tokens, computed)
        stored = []
        if copies is not None:
            assert copies == []
            num_stored = manager.cache_blocks(call.request, request.block_hashes)
            stored = request.block_hashes[num_cached_before : num_cached_before + num_stored]
        return {
            "refused": copies is None,
            "blocks": len(manager.tables.get(call.request, ())),
            "evicted": list(self.evicted),
            "stored": [self.names[block_hash] for block_hash in stored],
        }

    def run(self, call) -> dict[str, object]:
        """What our manager did, by the fields of the call that are outcomes."""
        manager = self.manager
        match call:
            case AddRequest():
                self.requests[call.request] = Request(call)
                self.add_tokens(self.requests[call.request], call.token_ids)
            case AppendTokens():
                self.add_tokens(self.requests[call.request], call.token_ids)
            case GetComputedBlocks():
                request = self.requests[call.request]
                request.computed = manager.get_computed_blocks(
                    request.block_hashes, len(request.token_ids)
                )
                return {"hit": request.computed.num_tokens}
            case AllocateSlots():
                return self.allocate(call)
            case FreeRequest():
                if call.request in manager.tables:
                    manager.free(call.request)
            case ResetPrefixCache():
                return {"done": manager.reset_prefix_cache()}
        return {}


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_every_call_has_the_outcome_that_it_had_in_vllm(path):
    trace = load_trace(path)
    replay = Replay(trace.num_blocks, trace.block_size)
    manager = replay.manager
    for number, call in enumerate(trace.calls):
        outcome = replay.run(call)
        outcome |= {
            "free": manager.num_free_blocks,
            "usage": round(manager.stats().usage, 6),
            # vLLM counts contents, we count blocks: two may hold the same.
            "cached": len({block_hash for block_hash, _ in manager.pool.prefix_index}),
        }
        assert outcome == {name: getattr(call, name) for name in outcome}, f"call {number}: {call}"
        check_manager(manager)


def test_the_traces_have_something_of_everything():
    calls = [call for path in TRACES for call in load_trace(path).calls]
    allocations = [call for call in calls if isinstance(call, AllocateSlots)]
    assert len(calls) > 3000
    assert sum(call.refused for call in allocations) > 200
    assert sum(len(call.evicted) for call in allocations) > 500
    assert sum(call.hit for call in calls if isinstance(call, GetComputedBlocks)) > 10_000
    assert {call.reason for call in calls if isinstance(call, FreeRequest)} == {
        "finished",
        "aborted",
        "preempted",
    }
    assert {call.done for call in calls if isinstance(call, ResetPrefixCache)} == {True, False}
