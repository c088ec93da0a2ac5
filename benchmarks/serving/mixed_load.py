"""Answers beside long prompts, on devices whose time is simulated: what the budget of a step costs.

    python -m benchmarks mixed_load
    python -m benchmarks mixed_load --targets 0.1 0.2 0.5 --answers 16 --prompt 8000

16 answers run, and prompts of 8,000 tokens come, each when the one before has its first token. The
engine is the real one, one step ahead, with a model of one layer that is never run: launching a
step books the device for

    max(weights / bandwidth, new tokens * price) + K/V / bandwidth + launches

seconds, and reading it moves the clock to the end of that. K/V are those of each answer's context,
read once, and those before the chunk of a prompt, which are gathered: read, written and read again.
The host takes no time.

Beside the fixed budgets (2,048 tokens alone, 512 beside answers) there are those that the engine
sets for steps of a given time. The first prompt, in which budgets are found, is in no figure but
"worst".

Prices and bandwidths are published by others or assumed (see `MACHINES`); nothing was run on a Mac.
"""

from __future__ import annotations

import argparse
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from benchmarks.lib.card import machine_card, make_arg_parser, print_card, print_json, print_table
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.model_runner import PooledRow
from mlx_paged.engine.scheduling.batch import Batch
from mlx_paged.engine.scheduling.step_budget import ClockedBudgets
from mlx_paged.models import qwen3
from mlx_paged.options.sampling_params import SamplingParams

NARROW: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "intermediate_size": 32,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "vocab_size": 64,
    "tie_word_embeddings": True,
    "max_position_embeddings": 2**20,
    "rope_theta": 1e6,
}
ANSWER_PROMPT_LEN = 16
NUM_GATHERS = 3  # of a token's K/V: read, written, read by attention
MEGA, GIGA = 1e6, 1e9


@dataclass(frozen=True)
class Machine:
    """What a device does, and what of it is published.

    Args:
        bandwidth: bytes per second.
        prompt_rate: prompt tokens per second of a 7B model in Q4_0.
        launch_seconds: of a kernel that depends on the one before; assumed.
    """

    bandwidth: float
    prompt_rate: float
    launch_seconds: float = 4e-6


@dataclass(frozen=True)
class Model:
    """What a model costs.

    Args:
        weights: bytes that a step of many tokens reads.
        multiplied: weights that a token is multiplied with, beside those of a 7B model.
        kv_bytes: of a token.
        num_launches: of a step.
    """

    weights: float
    multiplied: float
    kv_bytes: float
    num_launches: int


# Bandwidth as Apple publishes it. Prompt tokens per second of M1 and M1 Max: llama.cpp's table of
# Macs (7B, Q4_0). M5 Max: 3.5 times the 886 of an M4 Max in that table, assumed from Apple's
# statement of 3 to 4 times M4's prefill.
MACHINES = {
    "M1": Machine(68 * GIGA, 118),
    "M1 Max": Machine(400 * GIGA, 530),
    "M5 Max": Machine(614 * GIGA, 3100),
}
# K/V of 8 heads of 128 in half, in 32 and in 48 layers; 14 launches per layer; assumed. A
# mixture of experts reads nearly all experts in a step of many tokens, and multiplies few of them.
MODELS = {
    "7B, 4 bits": Model(3.8 * GIGA, 1.0, 131_072, 450),
    "30B-A3B, 4 bits": Model(17 * GIGA, 3.3 / 7, 98_304, 700),
}
# A 16 GB M1 does not hold it.
TOO_LARGE = {("M1", "30B-A3B, 4 bits")}


class VirtualDevice:
    """Books the time of steps, and says what time it is.

    Args:
        answer_context: tokens that each answer attends to. Taken as fixed, because the side that
            runs more steps would be given longer answers.
    """

    def __init__(self, machine: Machine, model: Model, answer_context: int):
        self.now = 0.0
        self._free = 0.0  # from when on
        self._ends: deque[float] = deque()  # of the steps that were not read
        self._machine, self._model, self._answer_context = machine, model, answer_context

    def clock(self) -> float:
        return self.now

    def seconds(self, batch: Batch) -> float:
        machine, model = self._machine, self._model
        parts = batch.scheduled
        num_read = sum(part.num_new_tokens == 1 for part in parts) * self._answer_context
        num_read += NUM_GATHERS * batch.num_gathered_tokens
        weights = model.weights / machine.bandwidth
        tokens = batch.num_tokens * model.multiplied / machine.prompt_rate
        return (
            max(weights, tokens)
            + num_read * model.kv_bytes / machine.bandwidth
            + model.num_launches * machine.launch_seconds
        )

    def drive(self, engine: Engine) -> None:
        """Let the steps of an engine take this device's time, and compute nothing."""
        read, vocab_size = engine.steps._read, engine.runner.vocab_size

        def launch(batch: Batch, awaited: object) -> tuple[mx.array, list[PooledRow]]:
            self._free = max(self._free, self.now) + self.seconds(batch)
            self._ends.append(self._free)
            num_rows = max(1, sum(part.num_logit_rows for part in batch.scheduled))
            return mx.zeros((num_rows, vocab_size)), []

        def timed_read(sampled: Any) -> Any:
            self.now = max(self.now, self._ends.popleft())
            return read(sampled)

        engine.runner.launch = launch  # type: ignore[method-assign]
        engine.steps._read = timed_read  # type: ignore[method-assign]


def run(device: VirtualDevice, target: float | None, args: argparse.Namespace) -> dict[str, Any]:
    """Figures of one side: ``target`` seconds beside answers, or ``None`` for fixed budgets."""
    mx.random.seed(0)
    engine = Engine(
        qwen3.Model(qwen3.ModelArgs.from_dict(NARROW)),
        kv_cache_bytes="1G",
        backend="reference",
        block_size=64,
        max_num_seqs=args.answers + 1,
        enable_prefix_caching=False,
        run_ahead=True,
    )
    device.drive(engine)
    if target is not None:
        engine.steps.budgets = ClockedBudgets(engine.scheduler.limits, 1.0, target, device.clock)
    for index in range(args.answers):
        params = SamplingParams(max_tokens=10**6, ignore_eos=True)
        engine.add_request(f"answer {index}", [1] * ANSWER_PROMPT_LEN, params)
    while {request.num_output_tokens > 1 for request in engine.scheduler.running} != {True}:
        engine.step()

    gaps: list[float] = []
    worst, first_tokens, starts = 0.0, list[float](), list[float]()
    num_answer_tokens = 0
    for number in range(args.prompts + 1):
        added = last = device.now
        starts.append(added)
        engine.add_request(f"prompt {number}", [2] * args.prompt, SamplingParams(max_tokens=1))
        is_answered = False
        while not is_answered:
            outputs = engine.step()
            is_answered = any(output.finished for output in outputs)
            num_answers = sum(not output.finished for output in outputs)
            if num_answers:
                assert num_answers == args.answers, "all answers go on in each step"
                worst = max(worst, device.now - last)
                if number:
                    gaps.append(device.now - last)
                    num_answer_tokens += num_answers
                last = device.now
        if number:
            first_tokens.append(device.now - added)
    seconds = device.now - starts[1]
    return {
        "between_tokens": dict(zip(("median", "p99"), np.quantile(gaps, (0.5, 0.99)), strict=True)),
        "worst": worst,
        "first_token": float(np.median(first_tokens)),
        "answer_tokens_per_second": num_answer_tokens / seconds,
        "prompt_tokens_per_second": args.prompts * args.prompt / seconds,
        "tokens_per_second": (num_answer_tokens + args.prompts * args.prompt) / seconds,
        "budget": engine.token_budgets[-1].mixed,
        "num_changes": len(engine.token_budgets) - 1,
    }


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for (machine, made), (model, cost) in itertools.product(MACHINES.items(), MODELS.items()):
        if (machine, model) in TOO_LARGE:
            continue
        fixed: dict[str, Any] = {}
        for target in (None, *args.targets):
            result = run(VirtualDevice(made, cost, args.answer_context), target, args)
            fixed = fixed or result
            yield {
                "machine": machine,
                "model": model,
                "target": target,
                # Tokens that a step multiplies while it reads the weights.
                "free_tokens": cost.weights / made.bandwidth * made.prompt_rate / cost.multiplied,
                "throughput_lost": 1 - result["tokens_per_second"] / fixed["tokens_per_second"],
                **result,
            }


def table(results: Sequence[dict[str, Any]]) -> None:
    print_table(
        [
            *("machine", "model", "target s", "tokens", "between: median", "p99", "worst"),
            *("first token s", "answers/s", "prompts/s", "all/s", "lost"),
        ],
        [
            [
                each["machine"],
                each["model"],
                "fixed" if each["target"] is None else f"{each['target']:g}",
                each["budget"],
                f"{each['between_tokens']['median']:.3f}",
                f"{each['between_tokens']['p99']:.3f}",
                f"{each['worst']:.2f}",
                f"{each['first_token']:.1f}",
                f"{each['answer_tokens_per_second']:.1f}",
                f"{each['prompt_tokens_per_second']:.0f}",
                f"{each['tokens_per_second']:.0f}",
                f"{each['throughput_lost']:.1%}",
            ]
            for each in results
        ],
    )


def setup_arg_parser() -> argparse.ArgumentParser:
    parser = make_arg_parser(__doc__)
    parser.add_argument("--targets", type=float, nargs="+", default=[0.1, 0.2, 0.5])
    parser.add_argument("--answers", type=int, default=16, help="that run")
    parser.add_argument("--answer-context", type=int, default=1000, help="tokens of each answer")
    parser.add_argument("--prompt", type=int, default=8000, help="tokens of each prompt")
    parser.add_argument("--prompts", type=int, default=5, help="that are measured")
    return parser


def main() -> None:
    args = setup_arg_parser().parse_args()
    mx.set_default_device(mx.cpu)
    setting = machine_card() | {
        "device": "simulated",
        "answers": args.answers,
        "answer_context": args.answer_context,
        "prompt": args.prompt,
        "prompts": args.prompts,
    }
    print_card("Answers beside long prompts", setting)
    setting["machines"] = {name: vars(each) for name, each in MACHINES.items()}
    setting["models"] = {name: vars(each) for name, each in MODELS.items()}
    results = list(measure(args))
    table(results)
    print_json("mixed_load", setting, results, args.out)


if __name__ == "__main__":
    main()
