"""Arguments of other packages are refused by name, with what to use here."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
from mlx_lm.sample_utils import make_sampler

from mlx_paged.batch_generation import BatchOptions, batch_generate
from mlx_paged.engine.async_engine import AsyncEngine
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.options import RequestOptions
from mlx_paged.generation import GenerationOptions, generate, generate_step, stream_generate
from mlx_paged.llm import LLM
from mlx_paged.loading import load
from mlx_paged.models.kv_cache import make_kv_cache
from mlx_paged.options.engine_options import ENGINE_OPTIONS, CacheOptions, EngineOptions
from mlx_paged.options.foreign_arguments import (
    INSTEAD,
    NAMES_ELSEWHERE,
    SAMPLER_OPTIONS,
    argument_names,
)
from mlx_paged.options.sampling_declarations import SAMPLING_PARAMS
from mlx_paged.options.sampling_params import SamplingParams, StructuredOutputsParams

ENTRIES: dict[str, Callable[..., Any]] = {
    "LLM": LLM,
    "LLM.generate": LLM.generate,
    "LLM.chat": LLM.chat,
    "Engine": Engine,
    "Engine.add_request": Engine.add_request,
    "AsyncEngine": AsyncEngine,
    "AsyncEngine.generate": AsyncEngine.generate,
    "AsyncEngine.stream": AsyncEngine.stream,
    "SamplingParams": SamplingParams,
    "StructuredOutputsParams": StructuredOutputsParams,
    "generate": generate,
    "stream_generate": stream_generate,
    "generate_step": generate_step,
    "batch_generate": batch_generate,
    "make_kv_cache": make_kv_cache,
    "load": load,
}
# What has a **options of its own takes these, too.
ALSO = {
    **dict.fromkeys(("LLM", "Engine", "AsyncEngine"), EngineOptions),
    **dict.fromkeys(("AsyncEngine.generate", "AsyncEngine.stream"), RequestOptions),
    **dict.fromkeys(("generate", "stream_generate", "generate_step"), GenerationOptions),
    "make_kv_cache": CacheOptions,
    "batch_generate": BatchOptions,
}


def names_of(entry: str) -> frozenset[str]:
    """The keywords that an entry takes."""
    more = ALSO[entry].__annotations__ if entry in ALSO else ()
    return argument_names(ENTRIES[entry]).union(more)


def required_arguments(entry: Callable[..., Any]) -> list[None]:
    parameters = inspect.signature(entry).parameters.values()
    required = [parameter for parameter in parameters if parameter.default is parameter.empty]
    return [None for parameter in required if parameter.kind is not parameter.VAR_KEYWORD]


@pytest.mark.parametrize("name", ENTRIES)
def test_every_public_entry_refuses_every_foreign_argument_in_one_line_that_says_what_to_use(
    name: str,
):
    entry = ENTRIES[name]
    for foreign in {*INSTEAD, "temperatur", "no_such_thing"} - names_of(name):
        with pytest.raises(TypeError) as refused:
            entry(*required_arguments(entry), **{foreign: 1})
        message = str(refused.value)
        assert message.startswith(f"{name}() has no argument {foreign!r}: ") and "\n" not in message
        assert len(message) < 700


def test_no_foreign_argument_is_one_of_ours():
    assert not {*SAMPLING_PARAMS, *ENGINE_OPTIONS} & INSTEAD.keys()


def test_each_foreign_argument_is_in_one_row_of_the_table():
    names = " ".join(NAMES_ELSEWHERE.values()).split()
    assert sorted(names) == sorted(INSTEAD)


def test_each_row_of_the_table_is_about_an_argument_or_has_advice():
    ours = {row for row in NAMES_ELSEWHERE if " " not in row}
    everything = frozenset[str]().union(*map(names_of, ENTRIES))
    assert ours - everything == set() and ours == {row for row in ours if row.isidentifier()}


def test_the_names_of_our_own_arguments_are_those_of_the_signatures():
    assert SAMPLING_PARAMS.keys() == argument_names(SamplingParams)
    assert ENGINE_OPTIONS.keys() == names_of("Engine") - {"model", "tokenizer"}
    assert set(SAMPLER_OPTIONS) < argument_names(make_sampler)


@pytest.mark.parametrize(
    ("entry", "name", "advice"),
    [
        ("generate", "temperature", "give sampler=make_sampler(temp=...)"),
        ("generate", "temp", "give sampler=make_sampler(temp=...)"),
        ("generate", "top_p", "give sampler=make_sampler(top_p=...)"),
        ("generate", "xtc_probability", "give sampler=make_sampler(xtc_probability=...)"),
        ("generate", "bad_words", "give SamplingParams(bad_words=...) to LLM.generate"),
        ("generate", "min_new_tokens", "give SamplingParams(min_tokens=...) to LLM.generate"),
        ("SamplingParams", "min_new_tokens", "use min_tokens"),
        ("SamplingParams", "bad_words_ids", "use bad_words"),
        ("generate", "max_new_tokens", "use max_tokens"),
        ("generate", "max_kv_size", "use window, the tokens that are kept"),
        ("generate", "prompt_cache", "an engine reuses the K/V of common prefixes by itself"),
        ("generate", "kv_bits", "use kv_format: 8, 4 or 'K:8,V:4'"),
        ("generate", "num_speculative_tokens", "use num_draft_tokens"),
        ("LLM", "speculative_config", "give draft_model and num_draft_tokens instead"),
        (
            "generate",
            "repetition_penalty",
            "give SamplingParams(repetition_penalty=...) to LLM.generate, or logits",
        ),
        ("generate", "sampling_params", "SamplingParams are for LLM.generate"),
        (
            "generate",
            "max_num_seqs",
            "give it where the engine is made, LLM(..., max_num_seqs=...)",
        ),
        ("generate", "seed", "call mlx.core.random.seed first"),
        ("LLM", "gpu_memory_utilization", "use kv_cache_bytes, such as '2G' or '256blocks'"),
        (
            "LLM",
            "tensor_parallel_size",
            "each machine has one GPU; mlx.launch starts the program on several, whose ranks",
        ),
        ("LLM", "n_gpu_layers", "a model runs on the one GPU of its machine"),
        ("LLM", "enforce_eager", "a decode is replayed from a trace where that is faster"),
        ("LLM", "swap_space", "use swap_bytes, such as '4G'"),
        ("LLM", "n_ctx", "use max_model_len"),
        ("LLM", "temperature", "give SamplingParams(temperature=...) to generate"),
        ("LLM", "model_path", "use model"),
        ("LLM", "trust_remote_code", "code of a model's repository is never run"),
        ("LLM", "max_num_seq", "did you mean max_num_seqs?"),
        ("LLM.generate", "temperature", "give SamplingParams(temperature=...)"),
        ("LLM.generate", "prompt_token_ids", "use prompts"),
        ("LLM.generate", "lora_request", "use adapter, the name of an adapter that LLM("),
        ("LLM", "lora_request", "give it to generate: LLM(..., adapters={name: folder})"),
        ("LLM", "max_loras", "use max_adapters"),
        ("LLM.generate", "sampling_parameters", "use sampling_params"),
        (
            "LLM.generate",
            "kv_cache_bytes",
            "give it where the engine is made, LLM(..., kv_cache_bytes=...)",
        ),
        ("LLM.chat", "add_generation_prompt", "give chat_template_kwargs"),
        ("SamplingParams", "temp", "use temperature"),
        ("SamplingParams", "best_of", "use n"),
        ("SamplingParams", "max_token", "did you mean max_tokens?"),
        ("make_kv_cache", "max_kv_size", "use window, the tokens that are kept"),
        ("make_kv_cache", "max_seq_len", "use kv_cache_bytes"),
        ("load", "model_path", "use path_or_hf_repo"),
        ("LLM", "kv_transfer_config", "use cache_dir, a folder for K/V on disk"),
        (
            "load",
            "cache_dir",
            "give it where the engine is made, LLM(..., cache_dir=...), a folder for K/V on disk; "
            "that of models is the Hugging Face cache, HF_HOME",
        ),
        ("StructuredOutputsParams", "structural_tag", "grammar, in llguidance's Lark, can say"),
        ("StructuredOutputsParams", "temperature", "give SamplingParams(temperature=...)"),
        ("StructuredOutputsParams", "regexp", "did you mean regex?"),
        (
            "load",
            "quantization",
            "weights run in the dtype and quantisation that they are stored in",
        ),
    ],
)
def test_the_advice_fits_the_function(entry: str, name: str, advice: str):
    function = ENTRIES[entry]
    with pytest.raises(TypeError, match=re.escape(f"{entry}() has no argument {name!r}: {advice}")):
        function(*required_arguments(function), **{name: 1})


@pytest.mark.parametrize(
    ("entry", "name", "ours"),
    [("load", "model_path", "path_or_hf_repo"), ("LLM.chat", "prompt_tokens", "messages")],
)
def test_where_a_foreign_argument_replaces_a_required_one_the_error_names_that(
    entry: str, name: str, ours: str
):
    given = required_arguments(ENTRIES[entry])[1:]
    with pytest.raises(TypeError, match=f"missing 1 required positional argument: '{ours}'"):
        ENTRIES[entry](*given, **{name: 1})


def test_a_function_that_refuses_keeps_its_signature_and_its_name():
    assert next(iter(inspect.signature(load).parameters)) == "path_or_hf_repo"
    assert (generate.__name__, LLM.generate.__qualname__) == ("generate", "LLM.generate")
    assert repr(SamplingParams(max_tokens=3)) == repr(SamplingParams(**{"max_tokens": 3}))
