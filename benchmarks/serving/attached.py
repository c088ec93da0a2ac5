"""mlx-lm's own programs on an attached model, beside the same model on mlx-lm's caches.

    python -m benchmarks attached                        # layers as Qwen3-0.6B's, random weights
    python -m benchmarks attached --model PATH_OR_REPO   # a real model, which is loaded twice

Decodes take turns, one call each on prompt caches of the same length, so that a machine that speeds
up or slows down does so for both; ratios of time are medians over these turns. Prompts are run by a
``BatchGenerator`` up to their first token: eight that begin alike, and then the next turns of eight
conversations whose first turns are cached. Each of these is timed on prompts of its own, in turns,
and the ratio is that of the minima.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx.nn.layers.base import Module
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache

from benchmarks.lib.card import machine_card, make_arg_parser, print_card, print_json, print_table
from benchmarks.lib.models import QWEN3_0_6B_LAYERS, random_weights
from mlx_paged import attach

SYSTEM = 512  # tokens that all prompts begin with
OWN = 32  # tokens of each prompt behind them


def two_models(name: str) -> tuple[Module, Module]:
    if name == "qwen3-0.6b-layers":
        return random_weights(QWEN3_0_6B_LAYERS)[1], random_weights(QWEN3_0_6B_LAYERS)[1]
    return mlx_lm.load(name)[0], mlx_lm.load(name)[0]


def token_ids(count: int, seed: int) -> list[int]:
    ids: list[int] = mx.random.randint(10, 4000, (count,), key=mx.random.key(seed)).tolist()  # type: ignore[assignment]
    return ids


def decode_ratio(
    models: Sequence[Any], batch_size: int, context: int, num_turns: int
) -> dict[str, float]:
    """Times of one decode call of each model, its logits evaluated."""
    calls = [_decode_of(model, batch_size, context) for model in models]
    times: list[list[float]] = [[], []]
    for turn in range(num_turns):
        for side in (0, 1) if turn % 2 else (1, 0):
            begin = time.perf_counter()
            calls[side]()
            times[side].append(time.perf_counter() - begin)
    ratios = [ours / theirs for theirs, ours in zip(*times, strict=True)]
    stock, attached = (1e3 * statistics.median(each) for each in times)
    return {"stock_ms": stock, "attached_ms": attached, "ratio": statistics.median(ratios)}


def _decode_of(model: Any, batch_size: int, context: int) -> Callable[[], None]:
    rows = []
    for row in range(batch_size):
        cache = make_prompt_cache(model)
        prompt = mx.array([token_ids(context, row)])
        for start in range(0, context, 512):
            model(prompt[:, start : start + 512], cache=cache)
            mx.eval([each.state for each in cache])
        rows.append(cache)
    held = rows[0]
    if batch_size > 1:
        held = [layer[0].merge(list(layer)) for layer in zip(*rows, strict=True)]
    del rows
    tokens = mx.full((batch_size, 1), 7, dtype=mx.int32)

    def decode() -> None:
        mx.eval(model(tokens, cache=held)[:, -1])

    for _ in range(3):
        decode()
    return decode


def prompt_times(models: Sequence[Any], num_turns: int) -> dict[str, dict[str, float]]:
    """Times until eight prompts have their first tokens, and those of a second turn of each."""
    times: dict[str, list[list[float]]] = {"one beginning": [[], []], "next turn": [[], []]}
    for turn in range(num_turns):
        system = token_ids(SYSTEM, 1000 + turn)
        prompts = [system + token_ids(OWN, 10 * turn + row) for row in range(8)]
        later = [prompt + token_ids(OWN, 7 + 10 * turn + row) for row, prompt in enumerate(prompts)]
        for side, model in enumerate(models):
            times["one beginning"][side].append(_time_to_first(model, prompts))
            times["next turn"][side].append(_time_to_first(model, later))
    results = {}
    for what, (stock, attached) in times.items():
        row = {"stock_ms": 1e3 * min(stock), "attached_ms": 1e3 * min(attached)}
        results[what] = {**row, "ratio": min(attached) / min(stock)}
    return results


def _time_to_first(model: Any, prompts: list[list[int]]) -> float:
    generator = BatchGenerator(model, max_tokens=1, prefill_step_size=512)
    begin = time.perf_counter()
    generator.insert(prompts)
    while generator.next_generated():
        pass
    return time.perf_counter() - begin


def main() -> None:
    parser = make_arg_parser(__doc__)
    parser.add_argument("--model", default="qwen3-0.6b-layers")
    parser.add_argument("--num-turns", type=int, default=100, help="decodes of each side")
    parser.add_argument("--num-prompts", type=int, default=5, help="rounds of prompts")
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 1024, 4096])
    args = parser.parse_args()
    models = two_models(args.model)
    setting = {
        **machine_card(),
        "model": args.model,
        "decodes": args.num_turns,
        "prompts": f"{SYSTEM} tokens in common and {OWN} of their own, 8 at a time",
    }
    print_card("mlx-lm's own programs on an attached model", setting)
    results: dict[str, dict[str, float]] = {}
    with attach(models[1], kv_cache_bytes="4G") as paged:
        for context in args.contexts:
            for batch_size in (1, 8) if context == args.contexts[0] else (1,):
                name = f"decode, {batch_size} x {context} tokens"
                results[name] = decode_ratio(models, batch_size, context, args.num_turns)
        results |= prompt_times(models, args.num_prompts)
        setting["hits"] = f"{paged.stats().num_hit_tokens} of {paged.stats().num_tokens} tokens"
    print_table(
        ["what", "mlx-lm's caches, ms", "attached, ms", "ratio"],
        [
            [name, f"{row['stock_ms']:.2f}", f"{row['attached_ms']:.2f}", f"{row['ratio']:.3f}"]
            for name, row in results.items()
        ],
    )
    print_json("attached", setting, results, args.out)


if __name__ == "__main__":
    main()
