"""Arguments of every public entry: one or two of a right call are replaced by unexpected values."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import mlx.core as mx
from fuzz_values import described, junk
from fuzzing import Case, Defect
from mlx.utils import tree_flatten
from paged_testing.integrity import check_scheduler

from mlx_paged import (
    LLM,
    AsyncEngine,
    Engine,
    SamplingParams,
    demo_model_path,
    generate,
    load,
    make_kv_cache,
    stream_generate,
)
from mlx_paged.batch_generation import batch_generate
from mlx_paged.cache import Sequences
from mlx_paged.generation import generate_step
from mlx_paged.models import qwen3
from mlx_paged.models.run_step import run_step
from mlx_paged.options.foreign_arguments import INSTEAD
from mlx_paged.options.sampling_declarations import SAMPLING_PARAMS

VOCAB_SIZE = 1024  # of the demo model's tokenizer
CONTEXT = 48
BUDGET = "40blocks"
NAMES = sorted({*INSTEAD, *SAMPLING_PARAMS, "temperatur", "foo", "self_", "kwargs"})


@cache
def tiny_model() -> qwen3.Model:
    """Random weights beside the demo model's tokenizer; a short context, so that each answer ends
    soon.
    """
    config = {
        "model_type": "qwen3", "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6,
        "vocab_size": VOCAB_SIZE, "tie_word_embeddings": False, "max_position_embeddings": CONTEXT,
        "rope_theta": 1e4,
    }  # fmt: skip
    mx.random.seed(3)
    model = qwen3.Model(qwen3.ModelArgs.from_dict(config))
    mx.eval([leaf for _, leaf in tree_flatten(model) if isinstance(leaf, mx.array)])
    return model


@cache
def tokenizer() -> Any:
    return load(demo_model_path())[1]


@cache
def llm() -> LLM:
    return LLM(tiny_model(), tokenizer(), kv_cache_bytes=BUDGET)


@cache
def sequences() -> Sequences:
    return Sequences(make_kv_cache(tiny_model(), kv_cache_bytes=BUDGET))


MESSAGES = [{"role": "user", "content": "Hello"}]


def _run(**arguments: Any) -> None:
    try:
        run_step(tiny_model(), sequences(), **arguments)
    finally:
        for seq in list(sequences()):
            sequences().free(seq)


def _sampling_params(**arguments: Any) -> None:
    (output,) = llm().generate([1, 2, 3], SamplingParams(**arguments), raise_on_error=False)
    _check_outputs([output])


def _check_outputs(outputs: list[Any]) -> None:
    engine = llm().engine
    if engine.has_unfinished_requests() or engine.stats().num_running or engine.stats().num_waiting:
        raise Defect("requests are left in the engine")
    check_scheduler(engine.scheduler)
    for output in outputs:
        if not output.finished:
            raise Defect("an output is not finished")
        error = output.error
        # What the user's own function raised is the user's.
        if error is None or isinstance(error, LookupError):
            continue
        if "\n" in str(error) or not str(error).startswith("["):
            raise Defect(
                f"the error of an output is no clear line: {type(error).__name__}: {error}"
            )


def _llm_call(name: str, **arguments: Any) -> None:
    outputs: list[Any] = []
    try:
        outputs = getattr(llm(), name)(**arguments)
    finally:
        _check_outputs(outputs)


def _llm(**arguments: Any) -> None:
    LLM(**arguments).generate([1, 2, 3], SamplingParams(max_tokens=2))


def _engine(**arguments: Any) -> None:
    engine = Engine(**arguments)
    engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=2))
    while engine.has_unfinished_requests():
        engine.step()
    check_scheduler(engine.scheduler)


def _async_engine(**arguments: Any) -> None:
    with AsyncEngine(**arguments) as engine:
        list(engine.stream([1, 2, 3], SamplingParams(max_tokens=2)))


def _stream_of_async_engine(**arguments: Any) -> None:
    with AsyncEngine(tiny_model(), tokenizer(), kv_cache_bytes=BUDGET) as engine:
        try:
            list(engine.stream(**arguments))
        finally:
            *_, last = engine.stream([1, 2, 3], SamplingParams(max_tokens=2))
            if len(last.outputs[0].token_ids) != 2:
                raise Defect("the engine does not answer any more")


def _generate_of_async_engine(**arguments: Any) -> None:
    async def read(engine: AsyncEngine) -> None:
        async for _ in engine.generate(**arguments):
            pass

    with AsyncEngine(tiny_model(), tokenizer(), kv_cache_bytes=BUDGET) as engine:
        asyncio.run(read(engine))


def _other_calls_of_engine(**arguments: Any) -> None:
    engine = llm().engine
    for call in (engine.abort, engine.prompt_progress):
        call(**arguments)
    _check_outputs([])


def _stream(**arguments: Any) -> None:
    list(stream_generate(**arguments))


def _steps(**arguments: Any) -> None:
    list(generate_step(**arguments))


def _generate(**arguments: Any) -> None:
    arguments.pop("verbose", None) if arguments.get("verbose") is True else None
    if not isinstance(generate(**arguments), str):
        raise Defect("generate returned no text")


def _batch_generate(**arguments: Any) -> None:
    arguments.pop("verbose", None) if arguments.get("verbose") is True else None
    response = batch_generate(**arguments)
    if not all(isinstance(text, str) for text in response.texts):
        raise Defect("batch_generate returned something else than texts")


def _load(**arguments: Any) -> None:
    load(**arguments)


def _make_kv_cache(**arguments: Any) -> None:
    cache = make_kv_cache(**arguments)
    with Sequences(cache).step({"a": 1}):
        pass


def _mlx_options() -> dict[str, Any]:
    return {
        "max_tokens": 2, "sampler": None, "logits_processors": None, "prefill_step_size": 8,
        "prompt_progress_callback": None, "kv": "paged", "block_size": 8,
        "kv_cache_bytes": BUDGET, "backend": "reference", "max_model_len": 20,
    }  # fmt: skip


def _engine_options() -> dict[str, Any]:
    return {
        "model": tiny_model(), "tokenizer": tokenizer(), "block_size": 16, "kv_cache_bytes": BUDGET,
        "seed": 0, "backend": "auto", "swap_bytes": "4blocks", "max_model_len": 20,
        "max_num_seqs": 4, "watermark": 0.1, "max_num_batched_tokens": 16, "priority_steps": 10,
        "max_num_mixed_tokens": 16, "prefill_step_seconds": 0.5, "mixed_step_seconds": 0.1,
        "enable_prefix_caching": True,
    }  # fmt: skip


def _params() -> dict[str, Any]:
    return {
        "n": 1, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 1,
        "repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1,
        "logit_bias": {3: 1.0}, "stop": ["x"], "ignore_eos": False, "stop_token_ids": [7],
        "max_tokens": 3, "logprobs": 2, "logits_processors": [], "xtc_probability": 0.5,
        "xtc_threshold": 0.1, "xtc_special_tokens": [3], "allowed_token_ids": [1, 2, 7],
        "bad_words": ["y"], "min_tokens": 2, "prompt_logprobs": 1, "skip_special_tokens": False,
        "include_stop_str_in_output": True,
    }  # fmt: skip


def _asked() -> dict[str, Any]:
    return {
        "prompt": [1, 2], "params": SamplingParams(max_tokens=3), "request_id": "r",
        "priority": 0, "cache_salt": None, "no_store": False,
    }  # fmt: skip


# What is called, and the arguments of a call that is right. Values that change what the others mean
# are left out.
ENTRIES: dict[str, tuple[Callable[..., None], Callable[[], dict[str, Any]]]] = {
    "SamplingParams": (_sampling_params, _params),
    "make_kv_cache": (_make_kv_cache, lambda: {
        "model": tiny_model(), "kind": "paged", "block_size": 16, "kv_cache_bytes": BUDGET,
        "kv_format": None, "backend": "auto"}),
    "run_step": (_run, lambda: {"batch": {"a": [1, 2]}}),
    "generate": (_generate, lambda: {
        "model": tiny_model(), "tokenizer": tokenizer(), "prompt": "Hello", "verbose": False,
        **_mlx_options()}),
    "stream_generate": (_stream, lambda: {
        "model": tiny_model(), "tokenizer": tokenizer(), "prompt": "Hello", **_mlx_options()}),
    "batch_generate": (_batch_generate, lambda: {
        "model": tiny_model(), "tokenizer": tokenizer(), "prompts": ["Hello", [1, 2]],
        "max_tokens": [2, 3], "verbose": False, "return_token_ids": True,
        "return_logprobs": True, "sampler": None, "logits_processors": None,
        "prefill_step_size": 8, "completion_batch_size": 2, "kv_cache_bytes": BUDGET}),
    "generate_step": (_steps, lambda: {"model": tiny_model(), "prompt": [1, 2], **_mlx_options()}),
    "LLM": (_llm, _engine_options),
    "LLM.generate": (partial(_llm_call, "generate"), lambda: {
        "prompts": ["Hello", [1, 2]], "use_tqdm": False, "priority": [0, 1],
        "sampling_params": SamplingParams(max_tokens=2), "raise_on_error": False}),
    "LLM.chat": (partial(_llm_call, "chat"), lambda: {
        "messages": [MESSAGES], "use_tqdm": False, "priority": [1], "chat_template_kwargs": {},
        "sampling_params": SamplingParams(max_tokens=2), "raise_on_error": False}),
    "Engine": (_engine, _engine_options),
    "Engine.abort": (_other_calls_of_engine, lambda: {"request_id": "x"}),
    "AsyncEngine": (_async_engine, _engine_options),
    "AsyncEngine.stream": (_stream_of_async_engine, _asked),
    "AsyncEngine.generate": (_generate_of_async_engine, _asked),
    "load": (_load, lambda: {
        "path_or_hf_repo": demo_model_path(), "tokenizer_config": None, "model_config": None,
        "adapter_path": None, "lazy": False, "return_config": False, "revision": None}),
}  # fmt: skip
# Other words for an argument in messages that are right.
ALSO_NAMED = {
    "prompt": ("token id", "text", "[prompt]"), "prompts": ("prompt", "priority"),
    "kv_cache_bytes": ("budget",), "kv": ("kind", "cache mode"), "kind": ("cache mode",),
    "token": ("token",), "path_or_hf_repo": ("[load]",), "model": ("[load]",),
    "batch": ("token", "step"), "max_tokens": ("max_tokens",), "adapter_path": ("[load]",),
    "model_config": ("[load]",), "tokenizer_config": ("[load]",), "n": ("completions",),
    "messages": ("[chat", "priority"), "max_num_seqs": ("max_num_batched_tokens",),
    "max_model_len": ("context", "leaves no room"), "length": ("trim",),
    "block_size": ("block", "budget"), "chat_template_kwargs": ("chat template",),
    "revision": ("[load]",),
    }  # fmt: skip


def library_case(rng: random.Random) -> Case:
    llm()  # Its thread is not one of the case's.
    name = rng.choice(list(ENTRIES))
    call, right = ENTRIES[name]
    arguments = right()
    changed = []
    for _ in range(1 if rng.random() < 0.7 else 2):
        key = rng.choice(NAMES) if rng.random() < 0.1 else rng.choice(list(arguments))
        arguments[key] = junk(rng)
        changed.append(key)
    if rng.random() < 0.03:
        arguments.pop(rng.choice(list(arguments)))
        changed += list(right())
    title = f"{name}({', '.join(f'{key}={described(arguments.get(key))}' for key in changed)})"
    names = tuple(word for key in changed for word in (key, *ALSO_NAMED.get(key, ())))
    return Case(
        title,
        lambda: call(**arguments),
        names,
        runs_own_code=any(map(_calls_back, arguments.values())),
    )


def _calls_back(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_calls_back, value))
    return (
        callable(value) and not isinstance(value, (str, qwen3.Model)) and not hasattr(value, "args")
    )
