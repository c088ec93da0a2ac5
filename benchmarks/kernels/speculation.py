"""Drafts by prompt look-up, and by a draft model, against plain decoding: how many times as fast,
on the same requests in one run.

    python -m benchmarks speculation                          # the demo model, some 2 minutes
    python -m benchmarks speculation --model random           # one whose weights outweigh Python
    python -m benchmarks speculation --model random --draft-model cut   # its first layer drafts
    python -m benchmarks speculation --model hybrid           # recurrent layers beside attention
    python -m benchmarks speculation --model A --draft-model B
    python -m benchmarks speculation --rows                   # what a step costs, by rows

Both sides are engines on the same model; they take turns with the same requests. The time is that
of the decodes, from the first token of the last stream on. A ratio is the median over the turns of
plain time over time with drafts: above 1 is faster. That of CPU time is steadier on a busy machine.
Answers are compared token by token.

    repetitive   a prompt that repeats itself, answered greedily
    mixed        the same prompt, sampled: the answer leaves the pattern and comes back
    unrelated    a prompt without repetition, sampled at temperature 1
"""

from __future__ import annotations

import argparse
import operator
import statistics
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from benchmarks.kernels.recurrent_sides import config_of, random_model
from benchmarks.lib.card import machine_card, print_card, print_json, print_table
from benchmarks.lib.models import QWEN3_0_6B_LAYERS, random_weights
from mlx_paged import Sequences, demo_model_path, load, run_step
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.speculation.step_costs import cost_of
from mlx_paged.models import qwen3
from mlx_paged.models.kv_cache import make_kv_cache
from mlx_paged.models.mlx_lm import adapt
from mlx_paged.options.sampling_params import SamplingParams

NUM_TOKENS = 96  # of an answer
TEXTS = ("repetitive", "mixed", "unrelated")
STREAMS = (1, 8)

# As in throughput.py: half as wide as Qwen3-0.6B.
SHAPE = QWEN3_0_6B_LAYERS | {
    "hidden_size": 512,
    "num_hidden_layers": 6,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}

# Qwen3.5's layers, narrow: on a CPU each row costs as much as a step of a wide one.
HYBRID = config_of("hybrid") | {
    "text_config": config_of("hybrid")["text_config"]
    | {
        "hidden_size": 128,
        "intermediate_size": 384,
        "vocab_size": 1024,
        "num_attention_heads": 4,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "head_dim": 32,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    }
}


def load_model(name: str) -> tuple[nn.Module, Any]:
    if name == "random":
        return random_weights(SHAPE)[0], None
    if name == "hybrid":
        return hybrid_model(), None
    return load(demo_model_path() if name == "demo" else name)[:2]


def hybrid_model() -> nn.Module:
    """Recurrent layers beside attention, after which the head mostly says the next one of twelve
    tokens: how often drafts are accepted is made up, the times are not.
    """
    model = random_model(HYBRID)
    text = model.language_model
    embeddings = text.model.embed_tokens.weight * 10  # outweigh what layers add
    vocab_size = len(embeddings)
    tokens = mx.arange(vocab_size)
    before = mx.minimum(tokens // 12 * 12 + (tokens - 1) % 12, vocab_size - 1)
    head = embeddings[before] / mx.linalg.norm(embeddings[before], axis=1, keepdims=True)
    text.model.embed_tokens.weight, text.lm_head.weight = embeddings, 0.7 * head
    mx.eval(model.parameters())
    return adapt(model, HYBRID)


def cut_model(model: nn.Module) -> nn.Module:
    """The model's first layer. Of a random model, later layers are made to add little, so that the
    first one often says the same: the acceptance is made up, the times are not.
    """
    arguments = vars(model.args) | {"num_hidden_layers": 1}
    cut = qwen3.Model(qwen3.ModelArgs(**arguments))
    for layer in model.layers[1:]:
        layer.self_attn.o_proj.weight *= 0.05
        layer.mlp.down_proj.weight *= 0.05
    names = dict(tree_flatten(cut.parameters()))
    weights = dict(tree_flatten(model.parameters()))
    cut.load_weights([(name, weights[name]) for name in names])
    mx.eval(model.parameters(), cut.parameters())
    return cut


def make_prompt(text: str, number: int, vocab_size: int) -> list[int]:
    """Token ids of the prompt of one stream; no two streams have the same."""
    mx.random.seed(1000 * TEXTS.index(text) + number)
    if text == "unrelated":
        return mx.random.permutation(min(vocab_size, 1000))[:90].tolist()  # type: ignore[return-value]
    piece: list[int] = mx.random.permutation(min(vocab_size, 1000))[:15].tolist()  # type: ignore[assignment]
    return piece * 6


def make_params(text: str, seed: int, temperature: float) -> SamplingParams:
    temperature = {"repetitive": 0.0, "mixed": temperature, "unrelated": 1.0}[text]
    return SamplingParams(
        temperature=temperature, seed=seed, max_tokens=NUM_TOKENS, ignore_eos=True
    )


def clock() -> tuple[float, float]:
    """Seconds by the wall, and of this process on any core."""
    return time.perf_counter(), time.process_time()


def decode(
    engine: Engine, prompts: list[list[int]], text: str, turn: int, temperature: float
) -> tuple[float, float, list[list[int]]]:
    """Seconds of the decodes, by the wall and of this process, and the answers."""
    for number, prompt in enumerate(prompts):
        params = make_params(text, 100 * turn + number, temperature)
        engine.add_request(str(number), prompt, params)
    answers: dict[str, list[int]] = {}
    start = None
    while engine.has_unfinished_requests():
        for output in engine.step():
            answers[output.request_id] = output.outputs[0].token_ids
        if start is None and len(answers) == len(prompts):
            start = clock()
    assert start is not None
    seconds, cpu_seconds = map(operator.sub, clock(), start)
    return seconds, cpu_seconds, [answers[str(n)] for n in range(len(prompts))]


def rows_of(engine: Engine) -> int:
    """Rows that were computed of answers; the first token of each comes with its prompt."""
    stats = engine.stats()
    num_prompt_rows = stats.num_prompt_tokens - stats.num_cached_prompt_tokens
    num_first_tokens = sum(stats.num_finished.values())
    return int(engine.latencies.iteration_tokens.sum) - num_prompt_rows - num_first_tokens


def measure(
    engines: dict[str, Engine], text: str, num_streams: int, args: argparse.Namespace
) -> dict[str, Any]:
    vocab_size = engines["plain"].runner.vocab_size
    prompts = [make_prompt(text, number, vocab_size) for number in range(num_streams)]
    ratios: list[float] = []
    cpu_ratios: list[float] = []
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    drafts = engines["drafts"]
    before, num_rows = drafts.stats().spec_decoding, rows_of(drafts)
    same = total = 0
    for turn in range(args.turns + 1):
        times, cpu_times, answers = {}, {}, {}
        for name in list(engines) if turn % 2 else list(engines)[::-1]:
            times[name], cpu_times[name], answers[name] = decode(
                engines[name], prompts, text, turn, args.temperature
            )
        pairs = zip(answers["plain"], answers["drafts"], strict=True)
        same += sum(a == b for one, other in pairs for a, b in zip(one, other, strict=True))
        total += num_streams * NUM_TOKENS
        if turn:  # The first one warms up.
            ratios.append(times["plain"] / times["drafts"])
            cpu_ratios.append(cpu_times["plain"] / cpu_times["drafts"])
            for name, value in times.items():
                seconds[name].append(value)
    after = drafts.stats().spec_decoding
    num_drafted = after.num_draft_tokens - before.num_draft_tokens
    num_accepted = after.num_accepted_tokens - before.num_accepted_tokens
    # Each token but the last one of an answer is computed once, and each rejected draft.
    num_computed = (args.turns + 1) * num_streams * (NUM_TOKENS - 1)
    num_repeated = rows_of(drafts) - num_rows - num_computed - (num_drafted - num_accepted)
    num_tokens = (num_streams * (NUM_TOKENS - 1)) / 1e3
    return {
        "text": text,
        "streams": num_streams,
        "ratio": statistics.median(ratios),
        "cpu_ratio": statistics.median(cpu_ratios),
        "ratio_of_fastest": min(seconds["plain"]) / min(seconds["drafts"]),
        "lowest": min(ratios),
        "highest": max(ratios),
        "ms_per_token": {
            name: statistics.median(values) / num_tokens for name, values in seconds.items()
        },
        "drafted_per_token": num_drafted / total,
        "accepted_per_token": num_accepted / total,
        "acceptance": num_accepted / max(1, num_drafted),
        "repeated_per_token": num_repeated / total,
        "same_tokens": same / total,
    }


def measure_rows(model: nn.Module, num_turns: int) -> list[dict[str, Any]]:
    """CPU time of a step by sequences and rows of each, beside what the gate takes it to cost."""
    sequences = Sequences(make_kv_cache(model, kv_cache_bytes="400blocks"))
    cost, results = cost_of(model), []  # type: ignore[arg-type]
    for num_seqs in STREAMS:
        for seq in range(num_seqs):
            # Whole blocks: a fork copies none.
            run_step(model, sequences, {seq: range(208)})
        times: dict[int, list[float]] = {}
        for _ in range(num_turns):
            for rows in (1, 2, 4, 8):
                for seq in range(num_seqs):
                    sequences.fork(seq, ("fork", seq))
                batch = {
                    ("fork", seq): range(seq * rows, (seq + 1) * rows) for seq in range(num_seqs)
                }
                start = time.process_time()
                run_step(model, sequences, batch, [rows] * num_seqs)
                times.setdefault(rows, []).append(time.process_time() - start)
                for fork in batch:
                    sequences.free(fork)
        results += [
            {
                "sequences": num_seqs,
                "rows": rows,
                "milliseconds": statistics.median(values) * 1e3,
                "measured": statistics.median(values) / statistics.median(times[1]),
                "rule": cost.of(num_seqs * rows) / cost.of(num_seqs),
            }
            for rows, values in times.items()
        ]
        for seq in range(num_seqs):
            sequences.free(seq)
    return results


def setup_arg_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="demo", help="demo, random, hybrid, a folder or a hub id"
    )
    parser.add_argument("--draft-model", help="cut (the model's first layer), a folder or a hub id")
    parser.add_argument("--num-draft-tokens", type=int, help="default: 7, with a draft model 3")
    parser.add_argument("--temperature", type=float, default=0.6, help="of the mixed text")
    parser.add_argument("--kv", default="paged", choices=["paged", "basic"])
    parser.add_argument("--turns", type=int, default=9, help="timed turns of each side")
    parser.add_argument("--streams", type=int, nargs="+", default=STREAMS)
    parser.add_argument("--rows", action="store_true", help="only what a step costs, by rows")
    parser.add_argument("--out", type=Path, help="also write the JSON line to this file")
    return parser


def main() -> None:
    args = setup_arg_parser().parse_args()
    model, _ = load_model(args.model)
    draft_model = None
    if args.draft_model is not None:
        is_cut = args.draft_model == "cut"
        draft_model = cut_model(model) if is_cut else load_model(args.draft_model)[0]
    if args.num_draft_tokens is None:
        args.num_draft_tokens = 7 if draft_model is None else 3
    setting = machine_card() | {
        "model": args.model,
        "drafts": f"up to {args.num_draft_tokens}, by {args.draft_model or 'prompt look-up'}",
        "answers": f"{NUM_TOKENS} tokens",
        "turns": args.turns,
        "kv": args.kv,
    }
    print_card("Speculation", setting)
    rows = measure_rows(model, args.turns)
    print_table(
        ["sequences", "rows of each", "ms", "over one row", "by the rule"],
        [
            [
                row["sequences"],
                row["rows"],
                f"{row['milliseconds']:.2f}",
                f"{row['measured']:.2f}",
                f"{row['rule']:.2f}",
            ]
            for row in rows
        ],
    )
    results: dict[str, Any] = {"rows": rows}
    if not args.rows:
        options = {"kv": args.kv, "kv_cache_bytes": "1000blocks"}
        engines = {
            "plain": Engine(model, **options),
            "drafts": Engine(
                model, draft_model=draft_model, num_draft_tokens=args.num_draft_tokens, **options
            ),
        }
        figures = [measure(engines, text, n, args) for n in args.streams for text in TEXTS]
        print_table(
            [
                "text",
                "streams",
                "ratio",
                "of CPU time",
                "of the fastest",
                "drafted",
                "accepted",
                "repeated",
                "same tokens",
            ],
            [
                [
                    each["text"],
                    each["streams"],
                    f"{each['ratio']:.2f}",
                    f"{each['cpu_ratio']:.2f}",
                    f"{each['ratio_of_fastest']:.2f}",
                    f"{each['drafted_per_token']:.2f}",
                    f"{each['accepted_per_token']:.2f}",
                    f"{each['repeated_per_token']:.2f}",
                    f"{each['same_tokens']:.2%}",
                ]
                for each in figures
            ],
        )
        results["speculation"] = figures
    print_json("speculation", setting, results, args.out)


if __name__ == "__main__":
    main()
