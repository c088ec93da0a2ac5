"""Arguments of other packages are refused by name, with what to use here."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from mlx_lm.sample_utils import make_sampler

from mlx_paged import foreign_arguments
from mlx_paged.batch_generation import BatchOptions, batch_generate
from mlx_paged.engine.async_engine import AsyncEngine
from mlx_paged.engine.engine import Engine, engine_option_names
from mlx_paged.engine_options import ENGINE_OPTIONS, CacheOptions
from mlx_paged.foreign_arguments import ADVICE, OTHER_NAMES, argument_names, refusal
from mlx_paged.generation import GenerationOptions, generate, generate_step, stream_generate
from mlx_paged.llm import LLM
from mlx_paged.loading import load
from mlx_paged.models.kv_cache import make_kv_cache
from mlx_paged.sampling_params import SamplingParams

ENTRIES: dict[str, tuple[foreign_arguments.Kind, Callable[..., Any]]] = {
    "LLM": ("engine", LLM),
    "LLM.generate": ("request", LLM.generate),
    "LLM.chat": ("request", LLM.chat),
    "Engine": ("engine", Engine),
    "Engine.add_request": ("request", Engine.add_request),
    "AsyncEngine": ("engine", AsyncEngine),
    "AsyncEngine.generate": ("request", AsyncEngine.generate),
    "AsyncEngine.stream": ("request", AsyncEngine.stream),
    "SamplingParams": ("params", SamplingParams),
    "generate": ("generate", generate),
    "stream_generate": ("generate", stream_generate),
    "generate_step": ("generate", generate_step),
    "batch_generate": ("generate", batch_generate),
    "make_kv_cache": ("cache", make_kv_cache),
    "load": ("load", load),
}
# What has a **options of its own takes these, too.
ALSO = {
    "LLM": engine_option_names(),
    "Engine": frozenset(ENGINE_OPTIONS),
    "AsyncEngine": engine_option_names(),
    "AsyncEngine.generate": argument_names(Engine.add_request),
    "AsyncEngine.stream": argument_names(Engine.add_request),
    "make_kv_cache": frozenset(CacheOptions.__annotations__),
    "batch_generate": frozenset(BatchOptions.__annotations__),
    **dict.fromkeys(
        ("generate", "stream_generate", "generate_step"),
        frozenset(GenerationOptions.__annotations__),
    ),
}
FOREIGN = sorted({*ADVICE, *OTHER_NAMES})


def required_arguments(entry: Callable[..., Any]) -> list[None]:
    parameters = inspect.signature(entry).parameters.values()
    required = [parameter for parameter in parameters if parameter.default is parameter.empty]
    return [None for parameter in required if parameter.kind is not parameter.VAR_KEYWORD]


@pytest.mark.parametrize("name", ENTRIES)
def test_every_public_entry_refuses_every_foreign_argument_in_one_line_that_says_what_to_use(
    name: str,
):
    _, entry = ENTRIES[name]
    own = argument_names(entry) | ALSO.get(name, frozenset())
    for foreign in [*FOREIGN, "temperatur", "no_such_thing"]:
        if foreign in own:
            continue
        with pytest.raises(TypeError) as refused:
            entry(*required_arguments(entry), **{foreign: 1})
        message = str(refused.value)
        assert message.startswith(f"{name}() has no argument {foreign!r}: ") and "\n" not in message
        assert len(message) < 600


def test_no_foreign_argument_is_one_of_ours():
    ours = {*foreign_arguments.PARAMS, *foreign_arguments.ENGINE_OPTIONS}
    assert not ours & {*ADVICE, *OTHER_NAMES}
    assert not set(ADVICE) & set(OTHER_NAMES)


def test_the_tables_of_our_own_names_are_those_of_the_signatures():
    assert set(foreign_arguments.PARAMS) == argument_names(SamplingParams)
    made = engine_option_names() - {"model", "tokenizer", "seed"}
    assert set(foreign_arguments.ENGINE_OPTIONS) == made
    assert set(foreign_arguments.SAMPLER_OPTIONS) < argument_names(make_sampler)


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
        ("LLM.generate", "lora_request", "adapters belong to a model, load(..., adapter_path=...)"),
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
        (
            "load",
            "quantization",
            "weights run in the dtype and quantisation that they are stored in",
        ),
    ],
)
def test_the_advice_fits_the_function(entry: str, name: str, advice: str):
    kind, function = ENTRIES[entry]
    known = argument_names(function) | ALSO.get(entry, frozenset())
    assert f"has no argument {name!r}: {advice}" in refusal(entry, kind, name, known)


def test_a_function_that_refuses_keeps_its_signature_and_its_name():
    assert next(iter(inspect.signature(load).parameters)) == "path_or_hf_repo"
    assert (generate.__name__, LLM.generate.__qualname__) == ("generate", "LLM.generate")
    assert repr(SamplingParams(max_tokens=3)) == repr(SamplingParams(**{"max_tokens": 3}))
