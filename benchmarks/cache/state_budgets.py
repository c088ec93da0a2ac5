"""What agents compute again with a hybrid model on a budget that K/V, states and checkpoints share,
and with fixed quarters of the same budget; and how many sequences run at once.

    python -m benchmarks state_budgets
    python -m benchmarks state_budgets --budgets 3.2 6 12 --trace TRACE.json

Sizes are those of a model, and the agents, or the trace, those of ``checkpoint_policies``. The
package's own block manager and budget run without arrays; requests come one after the other, in
chunks of 2,048 tokens. Fixed quarters are what this package did before: a quarter for running
states, at most a quarter for checkpoints, and the rest for K/V.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from benchmarks.cache.checkpoint_policies import (
    BLOCK_SIZE,
    CHUNK,
    Request,
    add_trace_arguments,
    traces_of,
)
from benchmarks.lib.card import machine_card, make_arg_parser, print_card, print_json, print_table
from mlx_paged.cache import KVCache, KVCacheConfig, LayerKV, LayerSpec
from mlx_paged.core import (
    BlockCopy,
    BlockTable,
    BudgetSizes,
    ComputedBlocks,
    KVCacheManager,
    SequenceState,
    SequenceStates,
    SharedBudget,
    checkpoints,
    hash_token_blocks,
)
from mlx_paged.models.kv_cache import NUM_COPIES_AHEAD
from mlx_paged.ops import AttentionMetadata, KVFormat

MAX_NUM_SEQS = 16
CONTEXT = 8_192


class Sizes(NamedTuple):
    """Of a model, in bytes."""

    state: int
    num_layers: int  # that attend
    num_kv_heads: int
    head_dim: int

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        heads, dim = self.num_kv_heads, self.head_dim
        return (LayerSpec(heads, dim, dim, format=KVFormat.dense("bfloat16")),) * self.num_layers


MODELS = {
    "Qwen3.5-27B": Sizes(int(146.8 * 2**20), 16, 4, 256),
    "Qwen3.5-35B-A3B": Sizes(int(61.4 * 2**20), 10, 2, 256),
    "LFM2-8B-A1B": Sizes(int(0.14 * 2**20), 6, 8, 64),
}


class NoArrays(KVCache):
    """A cache that counts blocks and stores nothing."""

    kind = "paged"

    @property
    def layers(self) -> Sequence[LayerKV]:
        return ()

    @property
    def arrays(self) -> list[mx.array]:
        return []

    @property
    def nbytes_held(self) -> int:
        return self.pool.num_blocks * self.config.nbytes_per_block

    def _allocate_layers(self) -> None: ...

    def _prepare(
        self, tables: Sequence[Sequence[BlockTable]], steps: Sequence[AttentionMetadata]
    ) -> None: ...

    def _finish(self) -> None: ...

    def _grow(self, num_new_blocks: int) -> bool:
        return True

    def _fit(self) -> None: ...

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None: ...


class Side:
    """One way to divide a budget."""

    def __init__(self, sizes: Sizes, budget: int, is_shared: bool):
        self._copies = NUM_COPIES_AHEAD
        one = KVCacheConfig(sizes.layers, BLOCK_SIZE, 1)
        if is_shared:
            num_seqs, left = 1, budget - self._copies * sizes.state
            num_states = self._useful(budget, one, left // sizes.state)
        else:
            # Another copy was for the state of a block that has no hash yet.
            most = budget // 4 // sizes.state
            num_seqs = min(MAX_NUM_SEQS, most // (self._copies + 1))
            num_states = self._useful(budget, one, most)
            left = budget - (num_seqs * (self._copies + 1) + num_states) * sizes.state
        num_blocks = left // one.nbytes_per_block - 1
        self.is_refused = num_blocks < 1 or num_seqs < 1
        if self.is_refused:
            return
        self.states = SequenceStates(num_states)
        config = KVCacheConfig(sizes.layers, BLOCK_SIZE, num_blocks, state_nbytes=sizes.state)
        self.cache = NoArrays(config)
        self.manager = KVCacheManager(self.cache.pool, states=self.states)
        self.num_seqs, self.num_shrunk, self.nbytes_copied = num_seqs, 0, 0
        if is_shared:
            of_budget = BudgetSizes(budget, config.nbytes_per_block, sizes.state, self._copies)
            self.cache.shared_budget = SharedBudget(of_budget, self.cache.pool, self.states)
            self.cache.shared_budget.count_seqs = lambda: len(self.manager.tables)

    @staticmethod
    def _useful(budget: int, one: KVCacheConfig, most: int) -> int:
        useful = max(2 * MAX_NUM_SEQS, checkpoints.MANY, budget // one.nbytes_per_token // 128)
        return min(useful, most)

    def num_running(self, num_tokens: int) -> int:
        """Sequences of this many tokens that run at once."""
        num_each = -(-num_tokens // BLOCK_SIZE)
        if self.cache.shared_budget is None:
            return min(self.num_seqs, self.cache.config.num_blocks // num_each)
        most = [
            n
            for n in range(MAX_NUM_SEQS + 1)
            if n * num_each <= self.cache.max_num_blocks(max(1, n))
        ]
        return most[-1]

    def fits(self, request: Request) -> bool:
        num_tokens = sum(map(len, request))
        return -(-num_tokens // BLOCK_SIZE) <= self.cache.max_num_blocks()

    def run(self, seq: str, request: Request) -> int:
        """Compute a request; returns how many of its prompt tokens were computed."""
        cache, manager, states = self.cache, self.manager, self.states
        num_prompt, tokens = len(request.prompt), [*request.prompt, *request.answer]
        hashes = hash_token_blocks(tokens, BLOCK_SIZE)
        computed = self._find(hashes, num_prompt)
        num_needed = manager.block_need.num_blocks_to_admit(len(tokens), computed)
        num_given = min(cache.num_blocks_to_shrink_by(1), manager.num_free_blocks - num_needed)
        num_given = max(num_given, -cache.num_growable_blocks(1))
        if num_given > 0:
            manager.shrink_pool(num_given)
            self.nbytes_copied += cache.nbytes_held
            self.num_shrunk += 1
            computed = self._find(hashes, num_prompt)
        assert cache.make_room_for_states(1)
        begin = num_computed = computed.num_tokens
        while begin < len(tokens):
            end = min(begin + CHUNK, len(tokens) if begin >= num_prompt else num_prompt)
            count, found = end - begin, computed if seq not in manager.tables else ComputedBlocks()
            is_new = seq not in manager.tables
            cache.make_room(manager.num_needed_blocks(seq, count, found), int(is_new))
            assert manager.allocate_slots(seq, count, found) is not None
            cuts = states.plan_cuts(seq, begin, end, BLOCK_SIZE)
            manager.cache_blocks(seq, hashes[: end // BLOCK_SIZE])
            kept = [(cut, None) for cut in cuts]
            states.end_step({seq: SequenceState(end, None)}, {seq: kept}, manager.tables)
            begin = end
            if cache.shared_budget is not None:
                assert cache.shared_budget.nbytes_used <= cache.nbytes_budget
        manager.free(seq)
        states.forget_released()
        return num_prompt - num_computed

    def _find(self, hashes: list[Any], num_prompt: int) -> ComputedBlocks:
        return self.manager.get_computed_blocks(hashes[: num_prompt // BLOCK_SIZE], num_prompt)


def share_computed(side: Side, requests: Iterable[Request]) -> tuple[float, int, Side]:
    """The share of prompt tokens that are computed, and how many requests are refused."""
    num_tokens = num_computed = num_refused = 0
    for number, request in enumerate(requests):
        if not side.fits(request):
            num_refused += 1
            continue
        num_tokens += len(request.prompt)
        num_computed += side.run(str(number), request)
    return num_computed / max(1, num_tokens), num_refused, side


def setup_arg_parser() -> argparse.ArgumentParser:
    parser = make_arg_parser(__doc__)
    parser.add_argument("--model", choices=MODELS, default="Qwen3.5-27B")
    parser.add_argument("--budgets", type=float, nargs="+", default=[2, 3.2, 6, 12, 24], help="GB")
    add_trace_arguments(parser)
    return parser


def main() -> None:
    args = setup_arg_parser().parse_args()
    setting = machine_card() | {"model": args.model, "seeds": args.seeds, "block_size": BLOCK_SIZE}
    print_card("One budget for K/V, states and checkpoints", setting)
    results = {
        name: _results(name, MODELS[args.model], each, args.budgets)
        for name, each in traces_of(args).items()
    }
    print_json("state_budgets", setting, results, args.out)


def _results(
    name: str, sizes: Sizes, traces: Sequence[Sequence[Request]], budgets: Sequence[float]
) -> Any:
    num_requests = sum(map(len, traces))
    found: dict[str, dict[float, Any]] = {"fixed quarters": {}, "one budget": {}}
    for kind, results in found.items():
        for budget in budgets:
            sides = [Side(sizes, int(budget * 1e9), kind == "one budget") for _ in traces]
            if sides[0].is_refused:
                results[budget] = None
                continue
            each = [share_computed(side, trace) for side, trace in zip(sides, traces, strict=True)]
            results[budget] = {
                "share": sum(share for share, _, _ in each) / len(each),
                "num_refused": sum(refused for _, refused, _ in each),
                "num_running": sides[0].num_running(CONTEXT),
                "num_checkpoints": len(sides[0].states.checkpoints),
                "num_blocks": sides[0].cache.pool.num_usable_blocks,
                "num_shrunk": sum(side.num_shrunk for side in sides),
                "nbytes_copied": sum(side.nbytes_copied for side in sides),
            }
    print(f"{name}: {num_requests} requests\n")
    print_table(
        ["% computed again (requests that do not fit; running at once)", *map(str, budgets)],
        [[kind, *map(_cell, results.values())] for kind, results in found.items()],
    )
    return {"requests": num_requests, "budgets": found}


def _cell(result: dict[str, Any] | None) -> str:
    if result is None:
        return "refused"
    share = 100 * result["share"]
    return f"{share:.1f} ({result['num_refused']}; {result['num_running']})"


if __name__ == "__main__":
    main()
