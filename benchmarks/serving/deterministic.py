"""What a deterministic engine costs, by count: steps, tokens of prompts that are computed, and the
time of steps on a device that is simulated.

    python -m benchmarks deterministic
    python -m benchmarks deterministic --machine "M5 Max"

Conversations of several turns run on the real engine with a model that is never run, and their
steps take the time of ``benchmarks.serving.mixed_load``, whose prices are published by others or
assumed. A turn begins when the one before it has ended: its prompt is all that came before, and new
tokens. The costs of `rows_matmul`, of attention row by row and of decodes that are not replayed are
not in it. Nothing was run on a Mac.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx

from benchmarks.lib.card import machine_card, make_arg_parser, print_card, print_json, print_table
from benchmarks.serving.mixed_load import MACHINES, MODELS, NARROW, VirtualDevice
from mlx_paged.engine.engine import Engine
from mlx_paged.models import qwen3
from mlx_paged.options.sampling_params import SamplingParams

MODEL = "7B, 4 bits"


@dataclass(frozen=True)
class Conversations:
    """Args:
    first: tokens of the first prompt of each.
    new: tokens that each further turn adds to what was said.
    answer: tokens of each answer.
    """

    count: int
    turns: int
    first: int
    new: int
    answer: int


WORKLOADS = {
    "chats": Conversations(8, 5, 300, 60, 200),
    "agents": Conversations(3, 12, 8000, 400, 80),
    "documents": Conversations(4, 1, 8000, 0, 300),
}


def run(asked: Conversations, device: VirtualDevice, deterministic: bool) -> dict[str, Any]:
    mx.random.seed(0)
    engine = Engine(
        qwen3.Model(qwen3.ModelArgs.from_dict(NARROW)),
        kv_cache_bytes="1G",
        backend="reference",
        run_ahead=True,
        deterministic=deterministic,
    )
    device.drive(engine)
    counts: Counter[str] = Counter()
    schedule = engine.scheduler.schedule

    def counted(*args: Any, **options: Any) -> Any:
        batch = schedule(*args, **options)
        computed = [
            min(part.num_new_tokens, part.completion.num_prompt_tokens - part.start)
            for part in batch.scheduled
        ]
        counts["steps"] += bool(batch.scheduled)
        counts["prompt_tokens"] += sum(tokens for tokens in computed if tokens > 0)
        return batch

    engine.scheduler.schedule = counted  # type: ignore[method-assign]
    rng = random.Random(0)

    def words(count: int) -> list[int]:
        return rng.choices(range(NARROW["vocab_size"]), k=count)

    params = SamplingParams(max_tokens=asked.answer, ignore_eos=True)
    said = {f"{index}": words(asked.first) for index in range(asked.count)}
    turns = Counter(dict.fromkeys(said, 1))
    asked_at = dict.fromkeys(said, 0.0)
    first_tokens: list[float] = []
    for name, prompt in said.items():
        engine.add_request(name, prompt, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            name, token_ids = output.request_id, output.outputs[0].token_ids
            if name in asked_at:
                first_tokens.append(device.now - asked_at.pop(name))
            if output.finished and turns[name] < asked.turns:
                said[name] = [*said[name], *token_ids, *words(asked.new)]
                turns[name], asked_at[name] = turns[name] + 1, device.now
                engine.add_request(name, said[name], params)
    return {**counts, "seconds": device.now, "first_token": sum(first_tokens) / len(first_tokens)}


def table(results: Sequence[dict[str, Any]]) -> None:
    print_table(
        ["workload", "deterministic", "steps", "prompt tokens", "first token s", "all s"],
        [
            [
                each["workload"],
                "yes" if each["deterministic"] else "no",
                each["steps"],
                each["prompt_tokens"],
                f"{each['first_token']:.2f}",
                f"{each['seconds']:.1f}",
            ]
            for each in results
        ],
    )


def setup_arg_parser() -> argparse.ArgumentParser:
    parser = make_arg_parser(__doc__)
    parser.add_argument("--machine", choices=MACHINES, default="M1 Max")
    return parser


def main() -> None:
    args = setup_arg_parser().parse_args()
    mx.set_default_device(mx.cpu)
    workloads = {name: asdict(each) for name, each in WORKLOADS.items()}
    setting = machine_card() | {"device": "simulated", "machine": args.machine, "model": MODEL}
    print_card("Deterministic engines", setting)
    setting["workloads"] = workloads
    results = [
        {"workload": name, "deterministic": deterministic}
        | run(
            asked,
            VirtualDevice(MACHINES[args.machine], MODELS[MODEL], asked.first),
            deterministic,
        )
        for name, asked in WORKLOADS.items()
        for deterministic in (False, True)
    ]
    table(results)
    print_json("deterministic", setting, results, args.out)


if __name__ == "__main__":
    main()
