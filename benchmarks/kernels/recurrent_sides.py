"""The sides of ``recurrent.py``: a Qwen3.5-like model, whole and in its parts, in engines here and
in mlx-lm's ``BatchGenerator``, with contexts that are filled instead of computed.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.generate import BatchGenerator
from mlx_lm.models import qwen3_5
from mlx_lm.models.cache import KVCache, make_prompt_cache

from mlx_paged.cache import LayerKV, Sequences
from mlx_paged.engine.engine import Engine
from mlx_paged.models.kv_cache import make_kv_cache
from mlx_paged.models.language_model import LanguageModel
from mlx_paged.models.mlx_lm.packed import PackedModel
from mlx_paged.models.run_step import run_step
from mlx_paged.ops import StateRow
from mlx_paged.options.sampling_params import SamplingParams

NUM_LAYERS, VOCAB_SIZE = 8, 4096
TEXT_CONFIG: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": VOCAB_SIZE,
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
# Every how many layers one attends: six of eight are recurrent; all are, so that there are no K/V;
# none is.
MODELS = {"hybrid": 4, "recurrent layers": 2 * NUM_LAYERS, "attention layers": 1}
NUM_TOKENS = 10**6  # no answer ends
PARAMS = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
BUDGET = "8000blocks"

Step = Callable[[], object]


def config_of(name: str) -> dict[str, Any]:
    text = {**TEXT_CONFIG, "full_attention_interval": MODELS[name]}
    return {"model_type": "qwen3_5", "text_config": text}


def random_model(config: dict[str, Any]) -> Any:
    """mlx-lm's Qwen3.5, with random weights in float32, the same ones each time."""
    mx.random.seed(0)
    model = qwen3_5.Model(qwen3_5.ModelArgs.from_dict(config))
    model.update(tree_map(lambda weight: weight.astype(mx.float32), model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    return model


def stock_model(name: str) -> nn.Module:
    model = random_model(config_of(name))
    # Where no layer is of a kind, none's cache makes a mask for that.
    text: Any = model.language_model.model
    if MODELS[name] > NUM_LAYERS:
        text.fa_idx = None
    if MODELS[name] == 1:
        text.ssm_idx = None
    return model  # type: ignore[no-any-return]


def packed_model(name: str) -> PackedModel:
    """The same one here."""
    return PackedModel(stock_model(name), config_of(name))


def prompt_of(length: int, seed: int) -> list[int]:
    return [(7 * index * index + 131 * seed + index) % VOCAB_SIZE for index in range(length)]


class Filled:
    """Stands for a model while prompts run: K/V are random and states those of a short prompt, so
    that a long context takes no time. What follows takes as long as behind a real one.
    """

    def __init__(self, model: LanguageModel):
        seqs = Sequences(make_kv_cache(model, kv_cache_bytes="9blocks"))
        run_step(model, seqs, {"a": prompt_of(20, 0)})
        states = seqs.manager.states
        self._state: StateRow | None = None if states is None else states.get("a", 20)

    def __call__(
        self, tokens: mx.array, layers: Sequence[LayerKV], logit_rows: mx.array | None = None
    ) -> mx.array:
        step = layers[0].step
        for layer in layers:
            spec = layer.spec
            shape = step.num_tokens, spec.num_kv_heads
            layer.update(
                mx.random.normal((*shape, spec.key_dim)), mx.random.normal((*shape, spec.value_dim))
            )
        for state in step.states or ():
            assert self._state is not None
            state.after = self._state.alone()
            state.at_cuts += [state.after for _ in state.cuts]
        return mx.zeros((len(tokens) if logit_rows is None else len(logit_rows), VOCAB_SIZE))


def engine_step(model: LanguageModel, num_streams: int, context: int, first: int = 0) -> Step:
    """A step of an engine in which all streams decode.

    Args:
        first: the number of the first stream.
    """
    engine = Engine(model, max_num_seqs=num_streams, kv_cache_bytes=BUDGET)
    for stream in range(first, first + num_streams):
        engine.add_request(str(stream), prompt_of(context, stream), PARAMS)
    engine.runner.model = Filled(model)  # type: ignore[assignment]
    while engine.stats().num_waiting or any(
        request.num_tokens <= request.num_prompt_tokens for request in engine.scheduler.running
    ):
        engine.step()
    engine.runner.model = model
    return engine.step


def one_at_a_time_step(model: LanguageModel, num_streams: int, context: int) -> Step:
    """As models with states ran before they ran packed: each sequence by itself, in turn."""
    steps = [engine_step(model, 1, context, stream) for stream in range(num_streams)]
    return lambda: [step() for step in steps]


def generator_step(model: nn.Module, num_streams: int, context: int) -> Step:
    """A step of mlx-lm's ``BatchGenerator`` in which all streams decode."""
    generator = BatchGenerator(
        model,
        max_tokens=NUM_TOKENS,
        completion_batch_size=num_streams,
        stream=mx.default_stream(mx.default_device()),  # so that a turn can wait for it
    )
    prompts = [prompt_of(context, stream) for stream in range(num_streams)]
    caches = [filled_cache(model, context - 1) for _ in prompts]
    generator.insert([prompt[-1:] for prompt in prompts], caches=caches)
    while len(generator.next_generated()) < num_streams:
        pass
    return generator.next_generated


def filled_cache(model: nn.Module, num_tokens: int) -> list[Any]:
    """mlx-lm's caches with random K/V of this many tokens, and states of a short prompt."""
    caches: list[Any] = make_prompt_cache(model)
    mx.eval(model(mx.array([prompt_of(20, 0)]), cache=caches))
    for cache in caches:
        if isinstance(cache, KVCache):
            keys: Any = cache.keys
            shape = 1, keys.shape[1], num_tokens, keys.shape[3]
            cache.keys, cache.values = mx.random.normal(shape), mx.random.normal(shape)
            cache.offset = num_tokens
            mx.eval(cache.keys, cache.values)
    return caches


# Builds a decode, lets a function look at what is evaluated of it, and evaluates it.
Pass = Callable[[Callable[[Sequence[mx.array]], Any]], Any]


def packed_pass(model: LanguageModel, num_streams: int, context: int) -> Pass:
    """Decodes of the model alone, without an engine."""
    tokens = mx.array([5] * num_streams)
    cache = make_kv_cache(model, kv_cache_bytes=BUDGET)
    seqs, filled = Sequences(cache), Filled(model)
    names = [str(stream) for stream in range(num_streams)]
    with seqs.step(dict.fromkeys(names, context)) as step:
        mx.eval(filled(tokens, cache.layers, step.logit_rows), cache.arrays)

    def run(look: Callable[[Sequence[mx.array]], Any]) -> Any:
        with seqs.step(dict.fromkeys(names, 1)) as step:
            outputs = [model(tokens, cache.layers, step.logit_rows), *cache.arrays]
            found = look(outputs)
            mx.eval(outputs)
        return found

    return run


def stock_pass(model: nn.Module, num_streams: int, context: int) -> Pass:
    """The same in mlx-lm, with its caches of a batch."""
    tokens = mx.array([[5]] * num_streams)
    caches = [filled_cache(model, context) for _ in range(num_streams)]
    batch = caches[0]
    if num_streams > 1:
        batch = [type(of_layer[0]).merge(list(of_layer)) for of_layer in zip(*caches, strict=True)]

    def run(look: Callable[[Sequence[mx.array]], Any]) -> Any:
        logits = model(tokens, cache=batch)[:, -1]
        kept = [each for cache in batch for each in cache.state if isinstance(each, mx.array)]
        found = look([logits, *kept])
        mx.eval(logits, kept)
        return found

    return run


def num_primitives(run: Pass) -> int:
    """Of the graph of a decode."""
    run(len)  # states are one stack from here on
    # What the CPU has begun is not in the graph any more.
    with mock.patch("mlx_paged.cache.paged.compute_meanwhile", lambda out: out):
        count: int = run(_num_primitives)
    return count


def _num_primitives(outputs: Sequence[mx.array]) -> int:
    dot = io.StringIO()
    mx.export_to_dot(dot, *outputs)
    return len(re.findall(r'label ?= ?"\w+"[^\n]*shape ?= ?rectangle', dot.getvalue()))
