"""What quantised K/V cost and save on the demo model: bytes, perplexity, recall, and speed beside
dense K/V in the same run.

    python -m benchmarks kv_formats
    python -m benchmarks kv_formats --model MODEL    # perplexity and divergence of another one

Text and questions are held out of the model's training. Perplexity, divergence and recall are read
off logits that the paged cache's own attention gave, teacher-forced in chunks, so that every token
sees the K/V of all tokens before it as they were stored; one document is also run token by token,
which is the decode. Bytes are those that a cache holds, and those of a cache with the rows of a
larger model: 8 KV heads of 128 in 16 bits. Speeds take turns; a ratio is the median over the turns.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from benchmarks.lib.card import machine_card, print_card, print_json, print_table
from benchmarks.lib.held_out import Question, documents, questions
from benchmarks.lib.turns import Step, median_ratio, take_turns
from mlx_paged import Sequences, demo_model_path, load, run_step
from mlx_paged.cache import KVCacheConfig, KVFormat, LayerSpec, PagedKVCache
from mlx_paged.models.language_model import LanguageModel
from mlx_paged.models.mlx_lm import check_model
from mlx_paged.options.config import KVBits

NAMES = ("K8V8", "K8V4", "K4V8", "K4V4")
PROSE = Path(__file__).parents[1] / "lib" / "prose.txt"  # of this project's DESIGN.md, 11/2026
RECALL = ("recall at 1000, any fact", "recall at 512, oldest fact", "copy, 11-40 items")


@dataclass(frozen=True)
class Unrotated(KVFormat):
    """4-bit K as it is, for comparison: no cache can be asked for it."""

    @cached_property
    def rotates_keys(self) -> bool:
        return False


def formats(spec: LayerSpec) -> dict[str, KVFormat]:
    """The formats that are compared, for layers of this shape; the first one is dense."""
    dtype = spec.format.key.dtype
    made = {"dense": spec.format}
    for name in NAMES:
        bits = KVBits.parse(name)
        assert bits is not None
        made[name] = KVFormat.quantised(bits, spec.key_dim, spec.value_dim, dtype)
    made["K4V4, not rotated"] = Unrotated(made["K4V4"].key, made["K4V4"].value)
    return made


def make_sequences(specs: list[LayerSpec], form: KVFormat, num_tokens: int) -> Sequences:
    layers = tuple(replace(spec, format=form) for spec in specs)
    num_blocks = -(-num_tokens // 16) + 1
    config = KVCacheConfig(layers, 16, num_blocks)
    return Sequences(PagedKVCache(config, initial_blocks=num_blocks))


def logits_of(
    model: LanguageModel, sequences: Sequences, ids: list[int], chunk: int
) -> Iterator[mx.array]:
    """Of all tokens, ``[chunk, vocab_size]`` float32 each; the sequence is forgotten at the end."""
    for start in range(0, len(ids), chunk):
        tokens = ids[start : start + chunk]
        yield run_step(model, sequences, {"s": tokens}, [len(tokens)]).astype(mx.float32)
    sequences.free("s")


def log_probabilities(
    model: LanguageModel, sequences: Sequences, ids: list[int], chunk: int
) -> mx.array:
    """``[num_tokens, vocab_size]`` float32"""
    logits = mx.concatenate(list(logits_of(model, sequences, ids, chunk)))
    found = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    mx.eval(found)
    return found


def measure_text(
    model: LanguageModel, sides: dict[str, Sequences], texts: list[list[int]], chunk: int
) -> dict[str, dict[str, float]]:
    """Perplexity, and the mean Kullback-Leibler divergence of the predictions from the dense ones,
    in nats.
    """
    losses = dict.fromkeys(sides, 0.0)
    divergences = dict(losses)
    num_predicted = sum(len(ids) - 1 for ids in texts)
    for ids in texts:
        dense = None
        for name, sequences in sides.items():
            found = log_probabilities(model, sequences, ids, chunk)[:-1]
            dense = found if dense is None else dense
            losses[name] -= float(found[mx.arange(len(ids) - 1), mx.array(ids[1:])].sum())
            divergences[name] += float((mx.exp(dense) * (dense - found)).sum())
    return {
        name: {
            "perplexity": math.exp(losses[name] / num_predicted),
            "divergence": divergences[name] / num_predicted,
        }
        for name in sides
    }


def count_right(
    model: LanguageModel, sequences: Sequences, asked: list[Question], chunk: int
) -> int:
    """How many answers greedy decoding gives exactly: each token is the most likely one after those
    before it.
    """
    right = 0
    for prompt, answer in asked:
        rows = list(logits_of(model, sequences, prompt + answer, chunk))
        best = np.array(mx.concatenate([row.argmax(-1) for row in rows]))
        first = len(prompt) - 1
        right += best[first : first + len(answer)].tolist() == answer
    return right


def decode_step(model: LanguageModel, sequences: Sequences, num_seqs: int, num_tokens: int) -> Step:
    """A decode of ``num_seqs`` sequences of ``num_tokens`` tokens, which stay so long."""
    prompt = [5 + index % 50 for index in range(num_tokens)]
    for seq in range(num_seqs):
        run_step(model, sequences, {seq: prompt})

    def step() -> None:
        run_step(model, sequences, {seq: [7] for seq in range(num_seqs)})
        for seq in range(num_seqs):
            sequences.trim(seq, num_tokens)

    return step


def measure_speed(
    model: LanguageModel, args: argparse.Namespace, forms: dict[str, KVFormat]
) -> dict[str, dict[str, float]]:
    """Tokens per second over dense: prompts of ``args.context`` tokens, and decodes behind them."""
    specs, context = model.layer_specs, args.context
    sides: dict[str, dict[str, Step]] = {"prefill": {}}
    prompt = [5 + index % 50 for index in range(context)]
    for name, form in forms.items():
        sequences = make_sequences(specs, form, context + 16)

        def prefill(sequences: Sequences = sequences) -> None:
            run_step(model, sequences, {0: prompt})
            sequences.free(0)

        sides["prefill"][name] = prefill
        for num_seqs in args.streams:
            sequences = make_sequences(specs, form, num_seqs * (context + 16))
            step = decode_step(model, sequences, num_seqs, context)
            sides.setdefault(f"decode of {num_seqs}", {})[name] = step
    ratios: dict[str, dict[str, float]] = {name: {} for name in forms}
    for what, steps in sides.items():
        times = take_turns(steps, args.turns, 2 if what == "prefill" else 8)
        for name in forms:
            ratios[name][what] = median_ratio(times["dense"], times[name])
    return ratios


def bytes_held(spec: LayerSpec, name: str) -> dict[str, float]:
    """Bytes per token of one layer in slabs that were allocated, and their share of 16-bit K/V."""
    form = formats(spec)[name]
    cache = make_sequences([spec], form, 1600).cache
    held = cache.nbytes_held / (cache.pool.num_blocks * 16)
    dense_16 = 2 * spec.num_kv_heads * (spec.key_dim + spec.value_dim)
    return {"bytes_per_token": held, "of_16_bits": held / dense_16}


def setup_arg_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=20_000, help="of held-out text, at least")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a document")
    parser.add_argument("--chunk", type=int, default=256, help="tokens per step")
    parser.add_argument("--questions", type=int, default=100, help="per kind")
    parser.add_argument("--context", type=int, default=512, help="tokens, for the speed")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--turns", type=int, default=15, help="turns of each side")
    parser.add_argument("--model", help="another model: only perplexity and divergence, on --text")
    parser.add_argument("--text", type=Path, default=PROSE, help="for --model")
    parser.add_argument("--out", type=Path, help="also write the JSON line to this file")
    return parser


def measure_model(args: argparse.Namespace) -> None:
    """Perplexity and divergence of another model on a text."""
    loaded, tokenizer = load(args.model)
    model = check_model(loaded)
    ids = tokenizer.encode(args.text.read_text())[: args.length]
    specs = model.layer_specs
    sides = {
        name: make_sequences(specs, form, len(ids)) for name, form in formats(specs[0]).items()
    }
    setting = machine_card() | {
        "model": Path(args.model).name,
        "text": f"{len(ids):,} tokens of {args.text.name}",
        "chunk": args.chunk,
    }
    print_card("Formats of K/V", setting)
    results = measure_text(model, sides, [ids], args.chunk)
    dense = results["dense"]["perplexity"]
    for found in results.values():
        found["perplexity_over_dense"] = found["perplexity"] / dense - 1
    print_table(
        ["K/V", "perplexity", "over dense", "divergence"],
        [
            [
                name,
                f"{found['perplexity']:.4f}",
                f"{100 * found['perplexity_over_dense']:+.3f}%",
                f"{found['divergence']:.2e}",
            ]
            for name, found in results.items()
        ],
    )
    print_json("kv_formats", setting, results, args.out)


def main() -> None:
    args = setup_arg_parser().parse_args()
    if args.model is not None:
        measure_model(args)
        return
    loaded, tokenizer = load(demo_model_path())
    model = check_model(loaded)
    texts = documents(tokenizer, args.tokens, args.length)
    longest = max(2048, *map(len, texts))
    specs = model.layer_specs
    forms = formats(specs[0])
    sides = {name: make_sequences(specs, form, longest) for name, form in forms.items()}
    setting = machine_card() | {
        "model": "demo (float32, 4 layers, 2 KV heads of 32: groups of 32)",
        "text": f"{sum(map(len, texts)):,} held-out tokens in {len(texts)} documents",
        "chunk": args.chunk,
        "questions": f"{args.questions} of each kind",
        "speed": f"{args.context} tokens of context, {args.turns} turns",
    }
    print_card("Formats of K/V", setting)
    text = measure_text(model, sides, texts, args.chunk)
    by_token = measure_text(model, sides, texts[:1], 1)
    in_chunks = measure_text(model, sides, texts[:1], args.chunk)
    recall = {
        kind: {name: count_right(model, side, asked, args.chunk) for name, side in sides.items()}
        for kind in RECALL
        for asked in [questions(tokenizer, kind, args.questions)]
    }
    speed = measure_speed(model, args, forms)
    large = LayerSpec(8, 128, 128, format=KVFormat.dense("bfloat16"))
    results: dict[str, Any] = {
        name: {
            "demo": bytes_held(model.layer_specs[0], name),
            "head_dim_128": bytes_held(large, name),
            **text[name],
            "perplexity_over_dense": text[name]["perplexity"] / text["dense"]["perplexity"] - 1,
            "first_document": {
                "perplexity_in_chunks": in_chunks[name]["perplexity"],
                "perplexity_token_by_token": by_token[name]["perplexity"],
            },
            "right": {kind: counts[name] for kind, counts in recall.items()},
            "tokens_per_second_over_dense": speed[name],
        }
        for name in forms
    }
    print_table(
        [
            "K/V",
            "of 16 bits: 128, demo",
            "perplexity",
            "over dense",
            "divergence",
            *RECALL,
            *speed["dense"],
        ],
        [
            [
                name,
                f"{found['head_dim_128']['of_16_bits']:.3f}, {found['demo']['of_16_bits']:.3f}",
                f"{found['perplexity']:.4f}",
                f"{100 * found['perplexity_over_dense']:+.3f}%",
                f"{found['divergence']:.2e}",
                *found["right"].values(),
                *(f"{ratio:.2f}" for ratio in speed[name].values()),
            ]
            for name, found in results.items()
        ],
    )
    print_json("kv_formats", setting, results, args.out)


if __name__ == "__main__":
    main()
