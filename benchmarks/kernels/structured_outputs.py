"""What keeping an answer to a grammar costs: the masks by themselves, and a decode step with them
beside one without.

    python -m benchmarks structured_outputs                  # vocabularies of 1,024 and 151,936
    python -m benchmarks structured_outputs --vocab 32000 --batch 1 4

The vocabularies are byte-level ones of random letters, digits and punctuation. The grammar is that
of a JSON array of objects with text, numbers and lists in them, and too long to end. Tokens are
drawn at random from what is allowed.

*Masks.* The host reads a token and fills the next mask (llguidance), for all requests of a step
together with unpacking the bits. The device adds them to the logits in one operation. Beside it:
the time of the argmax of a greedy step.

*Steps.* Two engines take turns, with the same prompts, one of them with the grammar. The model has
28 layers, so narrow that computing them costs next to nothing, and kernels are stand-ins of one
primitive (see `overlap.py`): what is left is host work. With `--device-ms`, each step also waits
for a device whose time is simulated, one step ahead, so that masks are filled while it works. The
ratio is the median, over the turns, of the time with over the time without, and beside it that of
the fastest turns. Logits are computed
and sampled on the CPU, whose operations on 16 rows of 151,936 logits take long; a GPU's don't.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper
from paged_testing.lazy_metal import fused_operations, lazy_metal
from paged_testing.simulated_device import SimulatedDevice
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.kernels.overlap import NARROW, PROMPT_LEN, BusyNorm
from benchmarks.lib.card import machine_card, make_arg_parser, print_card, print_json, print_table
from benchmarks.lib.turns import Step, median_ratio, num_steps_taken, take_turns
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.request import Request, TokenRules
from mlx_paged.engine.sampling.grammar import GrammarCompiler, Vocabulary
from mlx_paged.engine.sampling.sampling_state import GrammarState, allow_tokens, fill_masks
from mlx_paged.models import qwen3
from mlx_paged.options.sampling_declarations import StructuredOutputsParams
from mlx_paged.options.sampling_params import SamplingParams

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJ0123456789" + ' {}[]":,._-\n'
ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "price": {"type": "number"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "price", "tags"],
    "additionalProperties": False,
}
ENDLESS = StructuredOutputsParams(json={"type": "array", "items": ITEM, "minItems": 10**6})


def make_tokenizer(vocab_size: int) -> TokenizerWrapper:
    """A byte-level tokenizer of random tokens, the last of which ends a text."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocabulary = {letter: index for index, letter in enumerate(sorted(byte_level.alphabet()))}
    rng = random.Random(0)
    while len(vocabulary) < vocab_size - 1:
        text = "".join(rng.choices(LETTERS, k=rng.randint(2, 9)))
        token = "".join(piece for piece, _ in byte_level.pre_tokenize_str(text))
        vocabulary.setdefault(token, len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = byte_level, decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return TokenizerWrapper(
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    )


def microseconds(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = work()
    return (time.perf_counter() - start) * 1e6, result


def measure_masks(tokenizer: Any, vocab_size: int, batch: int, num_tokens: int) -> dict[str, Any]:
    """Microseconds, for all requests of a step, by what is done."""
    set_up, _ = microseconds(lambda: Vocabulary.read(tokenizer, vocab_size))
    compiler = GrammarCompiler(tokenizer, vocab_size)
    compiler.compile(StructuredOutputsParams(regex="a"))
    compiling, grammar = microseconds(lambda: compiler.compile(ENDLESS))
    params, rules = SamplingParams(), TokenRules(grammar=grammar)
    requests = [Request(f"{n}", [1], params, token_rules=rules) for n in range(batch)]
    completions = [request.completions[0] for request in requests]
    copying, states = microseconds(lambda: [GrammarState(grammar) for _ in completions])
    logits = mx.random.normal((batch, vocab_size))
    mx.eval(logits)
    rng = np.random.default_rng(0)
    filling, masking, choosing = [], [], []
    for _ in range(num_tokens):
        taken, (allowed, failed) = microseconds(lambda: fill_masks(states, completions))
        assert not failed
        filling.append(taken)
        taken, rows = microseconds(partial(masked, logits, allowed))
        masking.append(taken)
        taken, _ = microseconds(partial(chosen, rows))
        choosing.append(taken)
        for completion, row in zip(completions, allowed, strict=True):
            completion.token_ids.append(int(rng.choice(np.flatnonzero(row))))
    return {
        "set_up": set_up,
        "compile": compiling,
        "copy": copying / batch,
        "host": statistics.median(filling),
        "host_worst": max(filling),
        "device": statistics.median(masking),
        "argmax": statistics.median(choosing),
    }


def masked(logits: mx.array, allowed: np.ndarray) -> mx.array:
    rows = allow_tokens(logits, list(range(len(allowed))), allowed)
    mx.eval(rows)
    return rows


def chosen(logits: mx.array) -> mx.array:
    tokens = mx.argmax(logits, axis=-1)
    mx.eval(tokens)
    return tokens


def make_step(
    model: qwen3.Model,
    tokenizer: Any,
    batch: int,
    num_tokens: int,
    params: StructuredOutputsParams | None,
) -> Step:
    """A step of an engine in which all requests decode."""
    engine = Engine(
        model,
        tokenizer,
        kv_cache_bytes=f"{batch * (PROMPT_LEN + num_tokens + 16) // 16}blocks",
        backend="metal",
        max_num_seqs=batch,
    )
    sampling = SamplingParams(max_tokens=num_tokens, detokenize=False, structured_outputs=params)
    if params is None:
        sampling = sampling.clone(ignore_eos=True)
    for index in range(batch):
        prompt = [(31 * index + place) % 64 for place in range(PROMPT_LEN)]
        engine.add_request(f"{index}", prompt, sampling)
    num_outputs = 0
    while num_outputs < batch:
        num_outputs = len(engine.step())

    def step() -> None:
        outputs = engine.step()
        assert len(outputs) == batch, f"{len(outputs)} of {batch} requests"

    return step


def measure_steps(
    device: SimulatedDevice, tokenizer: Any, vocab_size: int, batch: int, args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    mx.random.seed(0)
    config = NARROW | {"vocab_size": vocab_size}
    model = qwen3.Model(qwen3.ModelArgs.from_dict(config))
    mx.eval(model.parameters())
    model.model.norm = BusyNorm(NARROW["hidden_size"], device)
    num_tokens = num_steps_taken(args.turns, args.steps) + 32
    for device_ms in args.device_ms:
        device.set_busy_time(device_ms / 1e3)
        steps = {
            "without": make_step(model, tokenizer, batch, num_tokens, None),
            "with": make_step(model, tokenizer, batch, num_tokens, ENDLESS),
        }
        times = take_turns(steps, args.turns, args.steps)
        yield {
            "device_ms": device_ms,
            "without_ms": statistics.median(times["without"]),
            "with_ms": statistics.median(times["with"]),
            "ratio": median_ratio(times["with"], times["without"]),
            "fastest_ratio": min(times["with"]) / min(times["without"]),
        }


def setup_arg_parser() -> argparse.ArgumentParser:
    parser = make_arg_parser(__doc__)
    parser.add_argument("--vocab", type=int, nargs="+", default=[1024, 151936], help="tokens")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16], help="requests")
    parser.add_argument("--device-ms", type=float, nargs="+", default=[0.0, 10.0])
    parser.add_argument("--tokens", type=int, default=200, help="of an answer, for the masks")
    parser.add_argument("--turns", type=int, default=15, help="turns of each side")
    parser.add_argument("--steps", type=int, default=8, help="steps of a turn")
    return parser


def main() -> None:
    args = setup_arg_parser().parse_args()
    mx.set_default_device(mx.cpu)
    setting = machine_card() | {
        "grammar": "an endless JSON array of objects",
        "model": "28 layers, hidden 16, kernels are stand-ins of one primitive",
        "turns": f"{args.turns} of {args.steps} steps",
    }
    print_card("Structured outputs", setting)
    device, results = SimulatedDevice(), []
    for vocab_size in args.vocab:
        tokenizer = make_tokenizer(vocab_size)
        for batch in args.batch:
            masks = measure_masks(tokenizer, vocab_size, batch, args.tokens)
            with lazy_metal(call_seconds=2e-6), fused_operations():
                steps = list(measure_steps(device, tokenizer, vocab_size, batch, args))
            results.append(
                {"vocab_size": vocab_size, "batch": batch, "masks_us": masks, "steps": steps}
            )
    print_masks(results)
    print_steps(results)
    print_json("structured_outputs", setting, results, args.out)


def print_masks(results: list[dict[str, Any]]) -> None:
    header = [
        "vocabulary", "batch", "set up ms", "compile ms", "copy us", "host us", "worst us",
        "device us", "argmax us",
    ]  # fmt: skip
    rows = []
    for result in results:
        masks = result["masks_us"]
        rows.append(
            [
                f"{result['vocab_size']:,}",
                result["batch"],
                *(f"{masks[name] / 1e3:.1f}" for name in ("set_up", "compile")),
                *(f"{masks[name]:.0f}" for name in ("copy", "host", "host_worst")),
                *(f"{masks[name]:.0f}" for name in ("device", "argmax")),
            ]
        )
    print_table(header, rows)


def print_steps(results: list[dict[str, Any]]) -> None:
    print_table(
        ["vocabulary", "batch", "device ms", "ms without", "ms with", "ratio", "of fastest"],
        [
            [
                f"{result['vocab_size']:,}",
                result["batch"],
                f"{step['device_ms']:g}",
                f"{step['without_ms']:.2f}",
                f"{step['with_ms']:.2f}",
                f"{step['ratio']:.2f}",
                f"{step['fastest_ratio']:.2f}",
            ]
            for result in results
            for step in result["steps"]
        ],
    )


if __name__ == "__main__":
    main()
