"""Drafts by the demo model's head: tokens per step by task, beside none and prompt look-up, and the
CPU time of whole answers with the head over without.

    python -m benchmarks heads                     # about a minute
    python -m benchmarks heads --questions 20      # steadier figures
    python -m benchmarks heads --model A --draft-model B

Questions are held out from training, one at a time, at temperature 0. A step with drafts has as
many as it may: tokens per step are what drafts are worth where rows cost nothing. "By the rule" is
the engine as it is: on a CPU, which multiplies all weights for each row, it seldom drafts. The
sides take turns with the same questions; a ratio is the median over the turns.

Then chips are simulated: the gain there from the best number of drafts, from the engine's table of
what a step costs by rows, by the share of drafts that are accepted and by streams. It is an
estimate, and no Mac has measured it. What other projects have published for such a chip and model
stands beside it; their heads, bits and texts differ.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from benchmarks.lib.card import machine_card, make_arg_parser, print_card, print_json, print_table
from benchmarks.lib.held_out import Question, questions
from mlx_paged import demo_model_path, load
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.request import Completion
from mlx_paged.engine.speculation.speculation import (
    NO_SPECULATION,
    PROMPT_LOOKUP,
    WAITING_SHARE,
    Speculation,
    StepCost,
)
from mlx_paged.engine.speculation.step_costs import ROW_COSTS
from mlx_paged.loading import load_draft_model
from mlx_paged.options.sampling_params import SamplingParams
from mlx_paged.request import NO_DRAFTS

TASKS = (
    "copy, 1-10 items",
    "copy, 11-40 items",
    "sequence",
    "count, 4-20 numbers",
    "numbered list, 2-15 lines",
    "arithmetic",
    "dialogue (not held out)",
    "says that it does not know",
    "one fact and its question",
    "recall at 256, any fact",
)
MAX_TOKENS = 120
NUM_STREAMS = (1, 2, 4, 8)
ACCEPTANCES = (0.5, 0.65, 0.8, 0.9)
NONE, LOOKUP, HEAD, RULE = "none", "look-up", "head", "by the rule"


class Target(NamedTuple):
    """A model on simulated chips.

    Attributes:
        weights: which row of a chip's table holds for it.
        draft_pass: the cost of a pass of its head over that of a step with one row: the weights of
            a layer and of the output layer over all that a token reads.
    """

    name: str
    weights: str
    draft_pass: float


# 0.4e9 and 1.3e9 of 25.6e9 weights; 0.07e9 and 0.5e9 of 3e9.
DENSE = Target("dense, 27B, 4 bits", "4 bits", 0.066)
MIXTURE = Target("35B-A3B, 4 bits", "mixture", 0.19)
# Tokens per second over those without drafts, of one stream if not said otherwise.
PUBLISHED = {
    ("M1", DENSE): "1.41 to 1.45 of its own loop, 1.05 of mlx-lm's (M1 Max, MTPLX #68)",
    ("M1 Ultra", DENSE): "0.59 and 0.70, for blocks of 4 and 3 (mlxcel)",
    ("M2", DENSE): "0.87 to 1.19 (M2 Max, Rapid-MLX #3140 and #3156)",
    ("M3 Ultra", DENSE): "2.19, 1.56 and 1.21 for 1, 2 and 3 streams (oMLX #3695)",
    ("M4", DENSE): "2.72 with DFlash2, 2.63 with DSpark (M4 Pro, mlx-dspark)",
    ("M4", MIXTURE): "0.88 to 0.92 (M4 Max, oMLX #2150); 1.3 with DSpark (M4 Pro, mlx-dspark)",
    ("M5", DENSE): "1.05 if drafts below 0.7 are dropped (M5 Pro, llama.cpp #27836)",
}


@dataclass(frozen=True)
class Always(Speculation):
    """As many drafts as there may be."""

    def num_drafts(self, completions: Sequence[Completion], *_: Any) -> Sequence[int]:
        return [self.num_draft_tokens] * len(completions)


def make_engines(args: argparse.Namespace) -> dict[str, Engine]:
    """By the side's name."""
    model, tokenizer, *_ = load(args.model)
    head = load_draft_model(args.draft_model, tokenizer, model)
    engines = {}
    for name in (NONE, LOOKUP, HEAD, RULE):
        engines[name] = engine = Engine(
            model,
            tokenizer,
            draft_model=head if name in (HEAD, RULE) else None,
            num_draft_tokens=args.num_draft_tokens,
            enable_prefix_caching=False,  # Turns repeat the questions.
            kv_cache_bytes="400blocks",
        )
        if name == NONE:
            engine.scheduler.speculation = NO_SPECULATION
        elif name != RULE:
            drafter = engine.runner.draft_model or PROMPT_LOOKUP
            engine.scheduler.speculation = Always(drafter, args.num_draft_tokens)
    return engines


def ask(engine: Engine, asked: Sequence[Question]) -> dict[str, Any]:
    """Answer the questions one by one."""
    num_steps = num_tokens = 0
    answers = []
    drafts, start = NO_DRAFTS, time.process_time()
    for question in asked:
        params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
        engine.add_request("a", question.prompt, params)
        length = 0
        while engine.has_unfinished_requests():
            # The first token of an answer comes with its prompt.
            num_steps += length > 0
            for output in engine.step():
                length = len(output.outputs[0].token_ids)
                if output.finished:
                    answers.append(output.outputs[0].token_ids)
                    drafts += output.outputs[0].spec_decoding
        num_tokens += length - 1
    return {
        "cpu_seconds": time.process_time() - start,
        "tokens": num_tokens,
        "tokens_per_step": num_tokens / max(1, num_steps),
        "accepted_by_depth": drafts.acceptance_rate_per_pos,
        "answers": answers,
    }


def measure(engines: dict[str, Engine], asked: Sequence[Question], turns: int) -> dict[str, Any]:
    """Tokens per step of each side, and ratios of CPU time over none."""
    ratios: dict[str, list[float]] = {HEAD: [], RULE: []}
    made = {name: ask(engine, asked) for name, engine in engines.items()}  # Warms up.
    for turn in range(turns):
        names = list(engines) if turn % 2 else list(engines)[::-1]
        made |= {name: ask(engines[name], asked) for name in names}
        for name, values in ratios.items():
            values.append(made[name]["cpu_seconds"] / made[NONE]["cpu_seconds"])
    expected = made[NONE]["answers"]
    return {
        "tokens": made[NONE]["tokens"],
        "tokens_per_step": {name: each["tokens_per_step"] for name, each in made.items()},
        "accepted_by_depth": {name: each["accepted_by_depth"] for name, each in made.items()},
        "cpu_ratio": {name: statistics.median(values) for name, values in ratios.items()},
        "same_answers": all(each["answers"] == expected for each in made.values()),
    }


def simulated_gain(
    chip: str, target: Target, acceptance: float, num_streams: int, max_drafts: int
) -> float:
    """Expected tokens per time over those of steps without drafts, which run ahead, with the best
    number of drafts for each of the streams.
    """
    costs = ROW_COSTS[chip][target.weights]
    step, draft_pass = StepCost.relative(costs), StepCost.relative(costs, target.draft_pass)
    best, num_tokens, plain_cost = 1.0, 1.0, step.of(num_streams)
    for num_drafts in range(1, max_drafts + 1):
        num_tokens += acceptance**num_drafts
        cost = step.of(num_streams * (1 + num_drafts)) + WAITING_SHARE * plain_cost
        cost += num_drafts * draft_pass.of(num_streams)
        best = max(best, num_tokens * plain_cost / cost)
    return best


def simulate(num_drafts: int) -> list[dict[str, Any]]:
    return [
        {
            "chip": chip,
            "model": target.name,
            "acceptance": acceptance,
            "gain": {
                str(n): simulated_gain(chip, target, acceptance, n, num_drafts) for n in NUM_STREAMS
            },
            "published": PUBLISHED.get((chip, target), ""),
        }
        for target in (DENSE, MIXTURE)
        for chip in ROW_COSTS
        for acceptance in ACCEPTANCES
    ]


def print_simulated(rows: Sequence[dict[str, Any]]) -> None:
    """A row per model and chip, with a column for each acceptance: the gains by streams."""
    by_chip: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        by_chip.setdefault((row["model"], row["chip"]), []).append(row)
    print_table(
        ["model", "chip", *(f"accepted: {each:.0%}" for each in ACCEPTANCES), "published"],
        [
            [
                *key,
                *(" ".join(f"{gain:.2f}" for gain in each["gain"].values()) for each in of_chip),
                of_chip[0]["published"],
            ]
            for key, of_chip in by_chip.items()
        ],
    )


def setup_arg_parser() -> argparse.ArgumentParser:
    parser = make_arg_parser(__doc__)
    parser.add_argument("--model", default=demo_model_path(), help="a folder (default: demo)")
    parser.add_argument("--draft-model", default="auto", help="a folder (default: auto)")
    parser.add_argument("--num-draft-tokens", type=int, default=3)
    parser.add_argument("--tasks", nargs="+", default=TASKS, help="default: all that are measured")
    parser.add_argument("--questions", type=int, default=6, help="of each task")
    parser.add_argument("--seed", type=int, default=1, help="of the questions")
    parser.add_argument("--turns", type=int, default=3, help="timed turns of each side")
    return parser


def main() -> None:
    args = setup_arg_parser().parse_args()
    engines = make_engines(args)
    setting = machine_card() | {
        "model": getattr(args.model, "name", args.model),
        "drafts": f"up to {args.num_draft_tokens}",
        "questions": f"{args.questions} of each task, seed {args.seed}",
        "answers": f"up to {MAX_TOKENS} tokens, temperature 0",
        "turns": args.turns,
    }
    print_card("Draft heads", setting)
    tokenizer = engines[NONE].tokenizer
    assert tokenizer is not None
    figures = []
    for task in args.tasks:
        asked = questions(tokenizer, task, args.questions, args.seed)
        figures.append({"task": task} | measure(engines, asked, args.turns))
    print_table(
        [
            "tokens per step",
            NONE,
            LOOKUP,
            HEAD,
            "its drafts accepted, by depth",
            "CPU time, head",
            f"CPU time, {RULE}",
        ],
        [
            [
                each["task"],
                *(f"{each['tokens_per_step'][name]:.2f}" for name in (NONE, LOOKUP, HEAD)),
                " ".join(f"{share:.0%}" for share in each["accepted_by_depth"][HEAD]),
                *(f"{each['cpu_ratio'][name]:.2f}" for name in (HEAD, RULE)),
            ]
            for each in figures
        ],
    )
    streams = ", ".join(map(str, NUM_STREAMS))
    print(f"# Simulated chips: expected gain for {streams} streams, an estimate\n")
    simulated = simulate(args.num_draft_tokens)
    print_simulated(simulated)
    print_json("heads", setting, {"tasks": figures, "simulated": simulated}, args.out)


if __name__ == "__main__":
    main()
