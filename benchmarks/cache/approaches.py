"""Ways to keep K/V, side by side on the same weights in one run: context, speed, memory, quality.

    python -m benchmarks approaches                            # the demo model, some 5 minutes
    python -m benchmarks approaches --model PATH_OR_REPO       # a real one
    python -m benchmarks approaches --quick                    # does it run at all
    python -m benchmarks approaches --only "paged" "sharing, 4 bits"  # some of them, beside mlx-lm

Approaches are in `approach_sides.py`. Each line with "sharing" is the engine with prefix sharing
and this one thing more: they do not add up. All take turns, each time with a fresh side; figures
are medians over the turns, and a ratio to mlx-lm is the median of the ratios within each turn.

    longest context  the longest prompt of one sequence whose K/V take no more than the budget: run,
                     and one token more refused. "any" is no limit but the model's own
    tok/s            answer tokens over the seconds from the first arrival to the last token: of
                     several requests at once with a common beginning, and of one alone
    TTFT             time to first token behind a long prefix: cold, after another request with it,
                     and after such a request of a process that has ended
    K/V              the most bytes of K/V arrays held between two steps of the several requests
    perplexity       of held-out text, over mlx-lm's: the last tokens of each document, decoded one
                     by one behind K/V that the approach holds of all before
    same choice      share of these places with mlx-lm's most likely token
    same tokens      share of the workloads' greedy answer tokens that equal mlx-lm's, by place

An approach that should give mlx-lm's tokens and does not, or a lossy one that is further off than
its bound, is said at the end, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx

from benchmarks.cache.approach_measures import (
    longest_context,
    predict,
    run_workload,
    times_to_first_token,
)
from benchmarks.cache.approach_report import (
    Turns,
    checks_of,
    print_approaches,
    print_checks,
    row_of,
)
from benchmarks.cache.approach_sides import (
    NO_CACHE,
    THEIRS,
    Approach,
    make_approaches,
    nbytes_per_token,
)
from benchmarks.lib.card import machine_card, make_arg_parser, print_card, print_json
from benchmarks.lib.held_out import documents
from benchmarks.lib.models import load_theirs, shape_of
from benchmarks.serving.throughput_scenarios import SampleRequest, Scenario
from mlx_paged import demo_model_path, load

SLOW_TOKENS = 2  # answer tokens of the approach that computes everything for each of them


@dataclass(frozen=True)
class Scale:
    """How much is run."""

    turns: int = 3
    budget_tokens: int = 768  # of dense K/V
    window: int = 512
    num_requests: int = 8
    shared: int = 512  # tokens of the common beginning
    own: int = 32
    answer: int = 32
    alone: int = 96  # answer tokens of the request that is alone
    prefix: int = 1000  # tokens, for the times to first token
    question: int = 16
    texts: int = 8
    text: int = 1024  # tokens
    predicted: int = 192  # of each text


QUICK = Scale(1, 256, 64, 3, 64, 8, 8, 8, 96, 8, 6, 128, 16)


@dataclass(frozen=True)
class Workloads:
    """What is asked, from held-out text."""

    together: Scenario
    alone: Scenario
    first_tokens: Callable[[int], Scenario]  # of a turn
    texts: list[list[int]]


def make_workloads(texts: list[list[int]], scale: Scale) -> Workloads:
    """Requests of pieces of the documents, of which each has at least ``scale.text`` tokens."""
    shared = texts[0][: scale.shared]
    together = [
        SampleRequest(f"r{i}", shared + text[: scale.own], scale.answer)
        for i, text in enumerate(texts[1 : scale.num_requests + 1])
    ]
    alone = [SampleRequest("alone", texts[-1][: scale.shared // 2], scale.alone)]

    def first_tokens(turn: int) -> Scenario:
        prefix = texts[turn % len(texts)][: scale.prefix]
        ends = [text[: scale.question] for text in texts[1:4]]
        requests = [SampleRequest(f"q{i}", prefix + end, 1) for i, end in enumerate(ends)]
        return Scenario(0, "first tokens", "", requests)

    return Workloads(
        Scenario(0, "together", "", together, pool_over_demand=1.5),
        Scenario(0, "alone", "", alone, pool_over_demand=1.5),
        first_tokens,
        [text[: scale.text] for text in texts[: scale.texts]],
    )


def shorter(scenario: Scenario) -> Scenario:
    requests = [
        replace(request, max_tokens=min(request.max_tokens, SLOW_TOKENS))
        for request in scenario.requests
    ]
    return replace(scenario, requests=requests)


def take_turns(
    approaches: dict[str, Approach], workloads: Workloads, num_turns: int
) -> dict[str, Turns]:
    seen = {name: Turns() for name in approaches}
    for turn in range(num_turns):
        order = list(approaches.values())
        for approach in order if turn % 2 == 0 else order[::-1]:
            own = seen[approach.name]
            tokens: dict[str, list[int]] = {}
            for scenario, speeds in (
                (workloads.together, own.together),
                (workloads.alone, own.alone),
            ):
                if approach.name == NO_CACHE:
                    scenario = shorter(scenario)
                serving, nbytes_held = run_workload(approach, scenario)
                speeds.append(serving.figures()["tokens_per_second"])
                tokens |= serving.tokens
                if scenario.name == "together":
                    own.nbytes_held = max(own.nbytes_held, nbytes_held)
            own.tokens = tokens
            own.first.append(times_to_first_token(approach, workloads.first_tokens(turn)))
            note(f"{approach.name}: turn {turn + 1} of {num_turns}")
    return seen


def note(what: str) -> None:
    print(f"{time.process_time():6.1f} s of CPU: {what}", file=sys.stderr, flush=True)


def setup_arg_parser() -> argparse.ArgumentParser:
    parser = make_arg_parser(__doc__)
    parser.add_argument("--model", default="demo", help="demo, a folder or a hub id")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these beside mlx-lm; all")
    parser.add_argument("--turns", type=int, help=f"of each approach; {Scale().turns}")
    parser.add_argument(
        "--quick", action="store_true", help="few and short requests, one turn: figures say nothing"
    )
    return parser


def chosen(approaches: dict[str, Approach], names: list[str] | None) -> dict[str, Approach]:
    """Those that were asked for, and mlx-lm, which all are compared with."""
    unknown = set(names or ()) - set(approaches)
    if unknown:
        raise SystemExit(
            f"approaches.py: --only: there is no {sorted(unknown)[0]!r}; there are "
            + ", ".join(map(repr, approaches))
        )
    wanted = {*(names or approaches), THEIRS}
    return {name: approach for name, approach in approaches.items() if name in wanted}


def main() -> int:
    args = setup_arg_parser().parse_args()
    scale = QUICK if args.quick else Scale()
    num_turns = args.turns or scale.turns
    path = demo_model_path() if args.model == "demo" else args.model
    (ours, tokenizer), theirs = load(path), load_theirs(path)
    num_texts = scale.num_requests + 2
    longest = max(scale.text, scale.prefix)
    texts = documents(tokenizer, num_texts * 2 * longest, longest)[:num_texts]
    workloads = make_workloads(texts, scale)
    nbytes = scale.budget_tokens * nbytes_per_token(ours)
    setting = machine_card() | {
        "model": args.model + (", quick: its figures say nothing" if args.quick else ""),
        "shape": shape_of(ours),
        "budget": f"{nbytes / 2**20:.2f} MiB of K/V: {scale.budget_tokens} tokens, dense",
        "together": f"{scale.num_requests} requests, {scale.shared} common and {scale.own} own "
        f"tokens, {scale.answer} more each",
        "alone": f"{scale.shared // 2} tokens, {scale.alone} more",
        "first tokens": f"{scale.prefix} tokens and {scale.question} of a question",
        "window": f"{scale.window} tokens and 4 sinks, in whole blocks",
        "held-out text": f"the last {scale.predicted} of {scale.text} tokens, "
        f"{len(workloads.texts)} documents",
        "turns": num_turns,
    }
    print_card("Approaches", setting)
    with tempfile.TemporaryDirectory(prefix="approaches") as temporary:
        made = make_approaches(ours, theirs, Path(temporary), scale.window)
        approaches = chosen(made, args.only)
        contexts = {}
        for name, approach in approaches.items():
            contexts[name] = longest_context(approach, theirs, nbytes, 4 * scale.budget_tokens)
            note(f"{name}: longest context")
        seen = take_turns(approaches, workloads, num_turns)
        predictions = {}
        for name, approach in approaches.items():
            predictions[name] = predict(approach, workloads.texts, scale.predicted)
            note(f"{name}: held-out text")
    rows = {
        name: row_of(
            approach,
            seen[name],
            seen[THEIRS],
            contexts[name],
            nbytes,
            predictions[name],
            predictions[THEIRS],
        )
        for name, approach in approaches.items()
    }
    print_approaches(rows)
    is_float32 = ours.dtype == mx.float32
    checks = {
        name: checks_of(approach, rows[name], is_float32, not args.quick)
        for name, approach in approaches.items()
    }
    print_checks(checks)
    results = {"approaches": rows, "checks": checks}
    print_json("approaches", setting, results, args.out)
    return 0 if all(each["met"] for made in checks.values() for each in made) else 1


if __name__ == "__main__":
    sys.exit(main())
