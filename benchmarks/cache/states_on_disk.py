"""What the states of recurrent models cost a disk, and what they are worth there: bytes per turn of
agents, and the share of prompt tokens that are computed again.

    python -m benchmarks states_on_disk

The agents are those of ``checkpoint_policies.py``, and so is the manager, which has room for all
K/V. Beside it is the rule by which an engine writes states (``engine/storing/unsaved.py``); what is
written is found again when it has left memory.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.cache.checkpoint_policies import (
    BLOCK_SIZE,
    Agents,
    Disk,
    Request,
    computed_again,
)
from benchmarks.lib.card import machine_card, make_arg_parser, print_card, print_json, print_table
from mlx_paged import SamplingParams
from mlx_paged.core import BlockHash, BlockPool, Checkpoint, KVCacheManager, SequenceStates
from mlx_paged.core.block_hash import HASH_NBYTES
from mlx_paged.core.tier import STATES, BlockHeader
from mlx_paged.engine.request import Request as EngineRequest
from mlx_paged.engine.storing.unsaved import Unsaved, num_tokens_per_state

MIB = 2**20


class Model(NamedTuple):
    """Sizes of a model in bfloat16, its state in part in float32."""

    name: str
    state_nbytes: int
    kv_nbytes_per_token: int


MODELS = [
    Model("Qwen3.5-27B", int(146.8 * MIB), 64 * 1024),
    Model("Qwen3.5-35B-A3B", int(61.4 * MIB), 20 * 1024),
    Model("Granite-4-H-small", int(145.7 * MIB), 16 * 1024),
    Model("LFM2-8B-A1B", int(0.14 * MIB), 12 * 1024),
]


class StatesOnDisk(Disk):
    """Keeps what is to be written, and brings it back.

    Args:
        states: those in memory.
        model: whose they are.
    """

    def __init__(self, states: SequenceStates, model: Model):
        self._checkpoints = states.checkpoints
        self._checkpoints.on_eviction = self._evicted
        worth = num_tokens_per_state(model.state_nbytes, model.kv_nbytes_per_token)
        self._keys: set[bytes] = set()
        stored = self._keys.__contains__
        self._unsaved = Unsaved(
            BlockPool(2, BLOCK_SIZE), range(1), stored, self._checkpoints, worth
        )
        self._blocks: set[BlockHash] = set()
        self.num_written = 0

    @property
    def num_kv_tokens(self) -> int:
        return len(self._blocks) * BLOCK_SIZE

    def bring(self, manager: KVCacheManager, hashes: Sequence[BlockHash], num_tokens: int) -> None:
        for absent in manager.absent_blocks(hashes, num_tokens, self._keys.__contains__):
            assert absent.group == STATES, "there is room for all K/V"
            block_hash = BlockHash(absent.block_hash[:HASH_NBYTES])
            self._checkpoints.put(Checkpoint(block_hash, None), absent.num_tokens)

    def note(self, request: Request, hashes: Sequence[BlockHash], begin: int, end: int) -> None:
        asked = EngineRequest("a", request.prompt, SamplingParams()).completions[0]
        asked.token_ids = [*request.prompt, *request.answer]
        asked.block_hashes = list(hashes)
        self._blocks.update(hashes[begin:end])
        self._unsaved.note_states(asked, begin, end)
        for header in self._unsaved.headers():
            self._write(header)
        self._unsaved.clear()

    def _evicted(self, checkpoint: Checkpoint) -> None:
        header = self._unsaved.take_evicted(checkpoint)
        if header is not None:
            self._write(header)

    def _write(self, header: BlockHeader) -> None:
        self._keys.add(header.block_hash)
        self.num_written += 1


def measured(model: Model, traces: Sequence[Sequence[Request]], num_states: int) -> dict[str, Any]:
    """Of a model that keeps this many states in memory."""
    num_requests = sum(map(len, traces))
    num_written = num_kv_tokens = 0
    shares = []
    for trace in traces:
        states = SequenceStates(num_states)
        disk = StatesOnDisk(states, model)
        shares.append(computed_again(trace, states, disk))
        num_written += disk.num_written
        num_kv_tokens += disk.num_kv_tokens
    return {
        "kv_nbytes_per_turn": round(num_kv_tokens * model.kv_nbytes_per_token / num_requests),
        "state_nbytes_per_turn": round(num_written * model.state_nbytes / num_requests),
        "states_written_per_turn": num_written / num_requests,
        "computed_again": sum(shares) / len(shares),
    }


def computed_again_without_disk(traces: Sequence[Sequence[Request]], num_states: int) -> float:
    shares = [computed_again(trace, SequenceStates(num_states)) for trace in traces]
    return sum(shares) / len(shares)


def setup_arg_parser() -> argparse.ArgumentParser:
    parser = make_arg_parser(__doc__)
    parser.add_argument("--requests", type=int, default=200, help="of synthetic agents, per seed")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--states", type=int, nargs="+", default=[8, 16, 64])
    return parser


def main() -> None:
    args = setup_arg_parser().parse_args()
    setting = machine_card() | {"seeds": args.seeds, "block_size": BLOCK_SIZE}
    print_card("States of recurrent models on disk, for agents", setting)
    results: dict[str, Any] = {}
    for keeps, kind in ((True, "kept"), (False, "dropped")):
        traces = [
            list(Agents(args.requests, keeps_reasoning=keeps, seed=seed).requests())
            for seed in range(args.seeds)
        ]
        rows, found = [], {}
        without = {count: computed_again_without_disk(traces, count) for count in args.states}
        for model in MODELS:
            for count in args.states:
                each = measured(model, traces, count)
                each["computed_again_without_disk"] = without[count]
                found[f"{model.name}, {count} states"] = each
                rows.append([model.name, str(count), *_cells(model, each)])
        print(f"agents, reasoning {kind}\n")
        print_table(
            ["", "in memory", "K/V", "states", "one per turn", "computed again, %", "without disk"],
            rows,
        )
        results[f"agents, reasoning {kind}"] = found
    print_json("states_on_disk", setting, results, args.out)


def _cells(model: Model, found: dict[str, Any]) -> list[str]:
    """MiB per turn, and shares."""
    nbytes = found["kv_nbytes_per_turn"], found["state_nbytes_per_turn"], model.state_nbytes
    shares = found["computed_again"], found["computed_again_without_disk"]
    return [*(f"{each / MIB:.1f}" for each in nbytes), *(f"{100 * each:.1f}" for each in shares)]


if __name__ == "__main__":
    main()
