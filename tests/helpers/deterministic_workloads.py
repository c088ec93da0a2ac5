"""Workloads on deterministic engines, each of whose answers is to have the bits of the same request
alone in a new engine.

On a CPU, MLX's own operations happen to have the same bits for any number of rows. So what a GPU
may do is put into them: each result is a little larger or smaller, by the lengths of the call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.nn.layers.quantized import QuantizedEmbedding

from helpers.drafting import eager_drafts, eager_speculation, knows
from helpers.engine_runs import CONFIG, known_of, livelier_model, load_demo
from helpers.workloads import Ask, Run, Workload
from mlx_paged.engine import options
from mlx_paged.loading import load_draft_model
from mlx_paged.models import matmul
from mlx_paged.ops import prefill
from mlx_paged.request import RequestOutput

# Shorter than an engine's, so that short prompts have several chunks.
CHUNK, NUM_ROWS = 32, 12
SIZES = CONFIG | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}


def shorten_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "CHUNK_TOKENS", CHUNK)
    monkeypatch.setattr(options, "MAX_STEP_ROWS", NUM_ROWS)


def let_mlx_vary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the bits of MLX's matmuls and attention depend on all lengths, as they may on a GPU."""

    def varied(result: mx.array, *lengths: int) -> mx.array:
        return result * (1 + hash(lengths) % 13 / 512)

    def by_rows(function: Callable[..., mx.array]) -> Callable[..., mx.array]:
        return lambda self, x: varied(function(self, x), x.size // x.shape[-1])

    for kind in (nn.Linear, nn.QuantizedLinear):
        monkeypatch.setattr(kind, "__call__", by_rows(kind.__call__))
    for kind in (nn.Embedding, QuantizedEmbedding):
        monkeypatch.setattr(kind, "as_linear", by_rows(kind.as_linear))
    # Subclasses refer to the methods that their classes had.
    monkeypatch.setattr(matmul, "_by_rows", cache(matmul._by_rows.__wrapped__))
    sdpa = prefill._sdpa
    monkeypatch.setattr(
        prefill,
        "_sdpa",
        lambda q, k, v, params: varied(sdpa(q, k, v, params), q.shape[2], k.shape[2]),
    )


# Weights of 16 bits, in 4 bits, with layers of windows and a tied head, and with a draft head.
KINDS = ("16 bits", "4 bits", "windows", "head")


@cache
def model_of(kind: str) -> Any:
    if kind == "head":
        return load_demo()[0]
    changes: dict[str, Any] = {"tie_word_embeddings": True} if kind == "windows" else {}
    if kind == "windows":
        changes |= {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
    model = livelier_model(SIZES | changes)
    model.set_dtype(mx.bfloat16)
    if kind == "4 bits":
        nn.quantize(model, group_size=32, bits=4)
    mx.eval(model.parameters())
    return model


@cache
def head() -> Any:
    return load_draft_model("auto", None, model_of("head"))


# The options that an answer depends on.
SEEN = ("block_size", "kv_format", "window", "num_sink_tokens")


def workload(
    seed: int, num_requests: int, max_tokens: int, kind: str = "16 bits", **changes: Any
) -> Workload:
    """
    Args:
        max_tokens: the most tokens of an answer.
        kind: of the model that it is for.
        changes: of the engine's options.
    """
    made = Workload(seed, num_requests, model_of(kind).args.vocab_size)
    for ask in made.asks.values():
        ask.params["max_tokens"] = min(ask.params["max_tokens"], max_tokens)
        ask.params["min_tokens"] = min(ask.params.get("min_tokens", 0), max_tokens)
        ask.params.setdefault("logprobs", 0)
    names = ("block_size", "kv_cache_bytes", "swap_bytes", "watermark")
    made.options = {name: made.options[name] for name in names}
    made.options |= {"deterministic": True, "max_num_seqs": 6, **changes}
    return made


def alone(kind: str, ask: Ask, options: dict[str, Any]) -> RequestOutput:
    """The output of a request in an engine of its own, without drafts and without hits."""
    model = model_of(kind)
    known = known_of(model)
    seen = {name: options[name] for name in SEEN if name in options}
    key = "alone", tuple(ask.tokens), repr(ask.params), repr(seen)
    if key not in known:
        single = Workload(0, 0, model.args.vocab_size)
        single.asks = {"0": Ask(ask.tokens, ask.params, comes_at=0)}
        single.options = {
            "deterministic": True,
            "kv_cache_bytes": "400blocks",
            "max_num_seqs": 6,
            **seen,
        }
        known[key] = single.run(model).outputs["0"]
    return known[key]


def compare(kind: str, asked: Workload) -> Run:
    """Run a workload, and compare each answer with that of its request alone, bit for bit. Drafts
    are often right, if there are any.
    """
    expected = {name: alone(kind, ask, asked.options) for name, ask in asked.asks.items()}
    more: dict[str, Any] = {}
    if "num_draft_tokens" in asked.options and kind == "head":
        more = {"draft_model": head(), "speculation": eager_drafts}
    elif "num_draft_tokens" in asked.options:
        answers = {
            (name, each.index): each.token_ids
            for name, output in expected.items()
            for each in output.outputs
        }
        speculation = eager_speculation(SIZES["vocab_size"], knows(answers), asked.seed)
        more = {"speculation": speculation}
    run = asked.run(model_of(kind), **more)
    for name, output in run.outputs.items():
        assert_same_bits(output, expected[name])
    return run


def assert_same_bits(ours: RequestOutput, theirs: RequestOutput) -> None:
    """What was reported has the same tokens and numbers; an abort may have cut it."""
    for one, other in zip(ours.outputs, theirs.outputs, strict=True):
        is_cut = one.finish_reason == "abort"
        count = len(one.token_ids) if is_cut else None
        assert one.token_ids == other.token_ids[:count], (ours.request_id, one.index)
        assert (one.logprobs or [])[:count] == (other.logprobs or [])[:count], ours.request_id
        assert is_cut or (one.finish_reason, one.stop_reason) == (
            other.finish_reason,
            other.stop_reason,
        )
    if ours.outputs[0].token_ids:
        assert ours.prompt_logprobs == theirs.prompt_logprobs, ours.request_id
    assert type(ours.error) is type(theirs.error) and str(ours.error) == str(theirs.error)
