"""Which states of a recurrent model to keep for agents: the share of prompt tokens that are
computed again, by policy and by how many states the budget holds.

    python -m benchmarks checkpoint_policies                      # synthetic agents
    python -m benchmarks checkpoint_policies --trace TRACE.json   # requests of your own

Synthetic agents share prompts of systems and tools, call tools and edit earlier messages; four run
side by side. Their reasoning is kept until the next user message comes, or never. A trace is a JSON
list of requests in the order of their coming, each with ``messages`` as a chat endpoint takes them;
four characters of their text count as a token.

What runs is the package's own block manager, with room for all K/V. So a token is computed again
only where a state is missing; the floor is what a state after every block would leave.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.lib.card import machine_card, make_arg_parser, print_card, print_json, print_table
from mlx_paged.core import (
    BlockHash,
    BlockPool,
    Cut,
    KVCacheManager,
    SequenceState,
    SequenceStates,
    checkpoints,
    hash_token_blocks,
)

BLOCK_SIZE = 64
CHUNK = 2048


class Request(NamedTuple):
    """A prompt and the answer to it, in tokens."""

    prompt: list[int]
    answer: list[int]


# Policies


class PromptEnds(SequenceStates):
    """The end of each prompt alone; least recently used first."""

    def cuts(self, seq: Any, begin: int, end: int, block_size: int) -> list[Cut]:
        return [cut for cut in super().cuts(seq, begin, end, block_size) if _is_of_prompt(cut)]


class ChunkEnds(PromptEnds):
    """Also the ends of chunks and of answers, as one would who keeps whatever is there."""

    def cuts(self, seq: Any, begin: int, end: int, block_size: int) -> list[Cut]:
        cuts = {cut.num_tokens: cut for cut in super().cuts(seq, begin, end, block_size)}
        of_prompt = self._beginnings[seq].num_prompt_tokens
        for place in range(begin + CHUNK, min(end, of_prompt), CHUNK):
            place -= place % block_size
            cuts.setdefault(place, Cut(place))
        if end > of_prompt and end // block_size * block_size > begin:
            last = end // block_size * block_size
            cuts.setdefault(last, Cut(last, is_of_answer=True))
        return [cuts[place] for place in sorted(cuts)]


class EveryBlock(SequenceStates):
    """The floor."""

    def cuts(self, seq: Any, begin: int, end: int, block_size: int) -> list[Cut]:
        first = begin // block_size * block_size + block_size
        return [Cut(place) for place in range(first, end + 1, block_size)]


def _is_of_prompt(cut: Cut) -> bool:
    return not cut.is_junction and not cut.is_of_answer


def never_superseded(states: SequenceStates) -> SequenceStates:
    states.checkpoints.supersede = lambda block_hash: None  # type: ignore[method-assign]
    return states


class Policy(NamedTuple):
    name: str
    make: Callable[[int], SequenceStates]
    many: int | None = None  # from how many states on all kinds are kept; as it is by default


NEVER = 2**62
POLICIES = [
    Policy("chunk and answer ends, LRU", lambda n: never_superseded(ChunkEnds(n)), NEVER),
    Policy("prompt ends, LRU", lambda n: never_superseded(PromptEnds(n)), NEVER),
    Policy("prompt ends, superseded first", SequenceStates, NEVER),
    Policy("and junctions and answers, by cost", SequenceStates, 0),
    Policy("this package", SequenceStates),
]


class Disk:
    """A place for states beside memory, and what is told of each request."""

    def bring(self, manager: KVCacheManager, hashes: Sequence[BlockHash], num_tokens: int) -> None:
        """A prompt of this many tokens is about to be looked up."""

    def note(self, request: Request, hashes: Sequence[BlockHash], begin: int, end: int) -> None:
        """Its blocks from ``begin`` to ``end`` are full."""


def computed_again(
    requests: Iterable[Request], states: SequenceStates, disk: Disk | None = None
) -> float:
    """The share of prompt tokens that are computed."""
    disk, requests = disk or Disk(), list(requests)
    # Room for all K/V, and for the null block.
    num_blocks = 1 + sum(
        (len(prompt) + len(answer)) // BLOCK_SIZE + 1 for prompt, answer in requests
    )
    manager = KVCacheManager(BlockPool(num_blocks, BLOCK_SIZE), states=states)
    num_prompt_tokens = num_computed = 0
    for number, request in enumerate(requests):
        seq, (prompt, answer) = str(number), request
        hashes = hash_token_blocks([*prompt, *answer], BLOCK_SIZE)
        of_prompt = hashes[: len(prompt) // BLOCK_SIZE]
        disk.bring(manager, of_prompt, len(prompt))
        computed = manager.get_computed_blocks(of_prompt, len(prompt))
        num_new = len(prompt) - computed.num_tokens
        num_prompt_tokens += len(prompt)
        num_computed += num_new
        num_noted = 0
        for count in (num_new, len(answer)):
            if not count:
                continue
            begin = manager.num_tokens(seq) or computed.num_tokens
            of_request = computed if seq not in manager.tables else type(computed)()
            assert manager.allocate_slots(seq, count, of_request) is not None, "room for all K/V"
            end = begin + count
            manager.cache_blocks(seq, hashes[: end // BLOCK_SIZE])
            kept = [(cut, None) for cut in states.cuts(seq, begin, end, BLOCK_SIZE)]
            states.end_step({seq: SequenceState(end, None)}, {seq: kept}, manager.tables)
            disk.note(request, hashes, num_noted, end // BLOCK_SIZE)
            num_noted = end // BLOCK_SIZE
        manager.free(seq)
    return num_computed / num_prompt_tokens


# Requests


@dataclass(frozen=True)
class Agents:
    """Synthetic agents, side by side.

    Attributes:
        num_requests: of all of them.
        num_conversations: at a time.
        keeps_reasoning: of all answers since the last user message, as chat templates for tools do;
            else none, so that a prompt goes on from the end of the one before.
    """

    num_requests: int
    num_conversations: int = 4
    keeps_reasoning: bool = True
    seed: int = 0

    def requests(self) -> Iterator[Request]:
        draw = random.Random(self.seed)
        systems = [_tokens(draw, 3000, 12000) for _ in range(3)]

        def begin() -> _Conversation:
            return _Conversation(draw, systems, self.keeps_reasoning)

        running = [begin() for _ in range(self.num_conversations)]
        for _ in range(self.num_requests):
            # Some conversations are busy while others wait.
            place = min(int(draw.expovariate(0.6)), len(running) - 1)
            conversation = running.pop(place)
            yield conversation.ask()
            if conversation.is_over:
                conversation = begin()
            running.insert(0 if draw.random() < 0.8 else len(running), conversation)


class _Conversation:
    def __init__(self, draw: random.Random, systems: list[list[int]], keeps_reasoning: bool):
        self._draw, self._keeps_reasoning = draw, keeps_reasoning
        self._messages = [draw.choice(systems), _tokens(draw, 50, 1500)]
        self._reasoning: list[int] = []  # places of messages that are left out at the next turn

    @property
    def is_over(self) -> bool:
        return sum(map(len, self._messages)) > 70_000 or self._draw.random() < 0.01

    def ask(self) -> Request:
        draw, messages = self._draw, self._messages
        prompt = [token for message in messages for token in message]
        reasoning, text = _tokens(draw, 20, 600), _tokens(draw, 20, 500)
        if self._keeps_reasoning:
            self._reasoning.append(len(messages))
            messages.append(reasoning)
        messages.append(text)
        kind = draw.random()
        if kind < 0.75:
            messages.append(_tokens(draw, 30, 3000))  # what a tool returned
        elif kind < 0.95:
            for place in reversed(self._reasoning):
                del messages[place]
            self._reasoning.clear()
            messages.append(_tokens(draw, 30, 800))
        else:  # an earlier message is written again
            self._reasoning.clear()
            del messages[draw.randrange(1, len(messages)) :]
            messages.append(_tokens(draw, 30, 800))
        return Request(prompt, reasoning + text)


def _tokens(draw: random.Random, low: int, high: int) -> list[int]:
    # Lengths of messages are spread over their magnitudes.
    length = int(low * (high / low) ** draw.random())
    return [draw.getrandbits(17) for _ in range(length)]


def trace_requests(path: Path) -> list[Request]:
    """Of a JSON list of requests with ``messages``. The answer to one is what the next one that
    goes on from it has there.
    """
    asked = [[_as_text(message) for message in each["messages"]] for each in _read(path)]
    requests = []
    for number, messages in enumerate(asked):
        later = (
            other[len(messages)]
            for other in asked[number + 1 :]
            if len(other) > len(messages) and other[: len(messages)] == messages
        )
        requests.append(Request(_as_tokens("".join(messages)), _as_tokens(next(later, ""))))
    return requests


def _read(path: Path) -> list[Any]:
    requests = json.loads(path.read_text())
    if not isinstance(requests, list):
        raise SystemExit(f"{path} is not a JSON list of requests")
    return requests


def _as_text(message: dict[str, Any]) -> str:
    return json.dumps(message, sort_keys=True)


def _as_tokens(text: str) -> list[int]:
    pieces = [text[begin : begin + 4] for begin in range(0, len(text), 4)]
    return [int.from_bytes(piece.encode()[:7], "little") for piece in pieces]


def add_trace_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that :func:`traces_of` reads."""
    parser.add_argument("--trace", type=Path, help="a JSON list of requests with messages")
    parser.add_argument("--requests", type=int, default=200, help="of synthetic agents, per seed")
    parser.add_argument("--seeds", type=int, default=2)


def traces_of(args: argparse.Namespace) -> dict[str, list[list[Request]]]:
    """The requests of a file, or of synthetic agents that keep or drop their reasoning."""
    if args.trace:
        return {"of a file": [trace_requests(args.trace)]}
    return {
        f"agents, reasoning {kind}": [
            list(Agents(args.requests, keeps_reasoning=keeps, seed=seed).requests())
            for seed in range(args.seeds)
        ]
        for keeps, kind in ((True, "kept"), (False, "dropped"))
    }


def setup_arg_parser() -> argparse.ArgumentParser:
    parser = make_arg_parser(__doc__)
    add_trace_arguments(parser)
    parser.add_argument("--states", type=int, nargs="+", default=[8, 16, 32, 64, 128])
    return parser


def main() -> None:
    args = setup_arg_parser().parse_args()
    setting = machine_card() | {"seeds": args.seeds, "block_size": BLOCK_SIZE}
    print_card("States of a recurrent model, kept for agents", setting)
    results = {name: _results(name, each, args.states) for name, each in traces_of(args).items()}
    print_json("checkpoint_policies", setting, results, args.out)


def _results(name: str, traces: Sequence[Sequence[Request]], counts: Sequence[int]) -> Any:
    lengths = [len(request.prompt) for trace in traces for request in trace]
    mean = round(sum(lengths) / len(lengths))

    def share(make: Callable[[], SequenceStates]) -> float:
        return sum(computed_again(trace, make()) for trace in traces) / len(traces)

    found: dict[str, dict[int, float]] = {}
    default = checkpoints.MANY
    for policy in POLICIES:
        checkpoints.MANY = default if policy.many is None else policy.many
        found[policy.name] = {count: share(partial(policy.make, count)) for count in counts}
    checkpoints.MANY = default
    floor = share(lambda: EveryBlock(2**30))
    print(f"{name}: {len(lengths)} requests, prompts of {mean:,} tokens, floor {100 * floor:.1f}\n")
    print_table(
        ["% of prompt tokens computed again, with states", *map(str, counts)],
        [
            [policy, *(f"{100 * each:.1f}" for each in shares.values())]
            for policy, shares in found.items()
        ],
    )
    return {"requests": len(lengths), "mean_prompt": mean, "floor": floor, "policies": found}


if __name__ == "__main__":
    main()
