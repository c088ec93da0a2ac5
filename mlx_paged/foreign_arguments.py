"""Advice about other projects' arguments. Does not import MLX.

Calls that were written for mlx-lm, vLLM, llama-cpp-python or transformers may have arguments that
are unknown here. As Python does, they raise ``TypeError``, in one line that says what to use.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Mapping
from functools import wraps
from typing import Literal, ParamSpec, TypeVar

from mlx_paged.engine_options import ENGINE_OPTIONS as DECLARED_OPTIONS
from mlx_paged.sampling_declarations import SAMPLING_PARAMS

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)

_DECLARED = {**DECLARED_OPTIONS, **SAMPLING_PARAMS}

# The kind of a public function: it makes an engine, adds requests, generates as mlx-lm, and so on.
Kind = Literal["engine", "request", "generate", "params", "cache", "load"]


def _by_name(names_of: Mapping[str, str]) -> dict[str, str]:
    """From texts, each with names separated by blanks, to a text for each name."""
    return {name: text for text, names in names_of.items() for name in names.split()}


# Maps other projects' names to those of this package.
OTHER_NAMES = _by_name(
    {
        "adapter_path": "lora_request enable_lora lora_path adapter max_loras",
        "model": "model_path model_name repo_id model_id pretrained_model_name_or_path",
        "prefill_step_size": "prefill_chunk_size n_batch max_prefill_tokens",
        "prompt": "prompt_token_ids input_ids inputs prompt_tokens text texts",
        "sampling_params": "sampling_parameters generation_config",
    }
) | _by_name({name: each.elsewhere for name, each in _DECLARED.items()})

_LOADING = "load the model first, model, tokenizer = mlx_paged.load(...), and give both"

# Maps other projects' names to advice, for arguments without a counterpart.
ADVICE = _by_name(
    {
        "an engine reuses the K/V of common prefixes by itself: keep one LLM, and give it the "
        "whole conversation": "prompt_cache",
        "K/V are quantised as they are written, in groups of 64, or 32 where a width needs it; "
        "give kv_format alone": "kv_group_size quantized_kv_start calculate_kv_scales",
        "give draft_model and num_draft_tokens instead": "speculative_config",
        "each machine has one GPU; mlx.launch starts the program on several, whose ranks share a "
        "model": (
            "tensor_parallel_size pipeline_parallel_size distributed_executor_backend tensor_split"
        ),
        "run a program on each machine, and distribute the requests among them": (
            "data_parallel_size"
        ),
        "a model runs on the one GPU of its machine; leave it out": (
            "device device_map n_gpu_layers n_threads stream_device main_gpu"
        ),
        "weights run in the dtype and quantisation that they are stored in; leave it out": (
            "dtype torch_dtype quantization quantize load_format load_in_4bit load_in_8bit "
            "quantization_config"
        ),
        "a decode is replayed from a trace where that is faster and gives the same bits; leave it "
        "out": ("enforce_eager compilation_config max_seq_len_to_capture"),
        "there is no beam search; leave it out": (
            "num_beams use_beam_search beam_width length_penalty early_stopping num_beam_groups"
        ),
        "the filters are top_k, top_p, min_p and xtc_probability; leave it out": (
            "typical_p tfs_z mirostat_mode mirostat_tau mirostat_eta top_a"
        ),
        "JSON has no white space but a space after a comma or a colon, or any with "
        "whitespace_flexible; leave it out": "disable_any_whitespace whitespace_pattern",
        "a JSON schema says it: additionalProperties": "disable_additional_properties",
        "grammar, in llguidance's Lark, can say the same": "structural_tag",
        "there is one grammar engine; leave it out": "disable_fallback guided_decoding_backend",
        "only text and token ids are supported; leave it out": (
            "prompt_embeds input_embeddings inputs_embeds multi_modal_data mm_processor_kwargs "
            "limit_mm_per_prompt images"
        ),
        "sequences are never padded; leave it out": (
            "attention_mask pad_token_id padding position_ids"
        ),
        "give chat_template_kwargs, which are the variables of the chat template": (
            "chat_template add_generation_prompt continue_final_message tools enable_thinking "
            "chat_template_content_format documents"
        ),
        _LOADING: (
            "revision tokenizer_config model_config hf_overrides lazy tokenizer_mode "
            "tokenizer_revision skip_tokenizer_init"
        ),
        "code of a model's repository is never run; leave it out": "trust_remote_code",
        "the Hugging Face cache is used, set HF_HOME": "download_dir",
        "the Hugging Face login is used, set HF_TOKEN": "hf_token token use_auth_token",
        "a temperature above 0 samples, and 0 takes the most likely token": "do_sample",
        "there is always a K/V cache; leave it out": "use_cache",
        "long prompts are always computed in chunks of max_num_batched_tokens; leave it out": (
            "enable_chunked_prefill"
        ),
        "stream_generate and AsyncEngine give an answer piece by piece": "stream streamer",
        "stream_generate gives the answer piece by piece, to be printed in any form": "formatter",
        "leave the loop over stream_generate, or give SamplingParams(stop=...)": (
            "stopping_criteria"
        ),
        "give logits_processors, a list of functions": "logits_processor",
        "the output has the prompt, too; leave it out": "echo",
        "nothing is logged; leave it out": "disable_log_stats disable_log_requests",
        "a prompt is never cut; shorten it before": "truncate_prompt_tokens",
        "special tokens stand in the text as the tokenizer decodes them; leave it out": (
            "spaces_between_special_tokens"
        ),
        "weights must always fit the model; leave it out": "strict",
        "outputs of LLM.generate and LLM.chat can hold errors; elsewhere errors are raised": (
            "raise_on_error"
        ),
    }
)

SAMPLER_OPTIONS = (
    "temp", "top_p", "top_k", "min_p", "xtc_probability", "xtc_threshold", "xtc_special_tokens",
)  # fmt: skip
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias")
PARAMS = tuple(SAMPLING_PARAMS)
# A seed counts as a sampling parameter.
ENGINE_OPTIONS = tuple(name for name in DECLARED_OPTIONS if name not in SAMPLING_PARAMS)
# One argument, as different functions call it.
_ALSO_CALLED = {
    "temperature": ("temp",),
    "prompt": ("prompts",),
    "model": ("path_or_hf_repo",),
    "sampling_params": ("params",),
    "max_model_len": ("kv_cache_bytes",),
}
# Advice about arguments that only other functions have.
_ELSEWHERE = {
    "model": _LOADING,
    "adapter_path": "adapters belong to a model, load(..., adapter_path=...)",
    "prompt": "give it to generate",
    "sampling_params": "SamplingParams are for LLM.generate; mlx-lm's functions take sampler and "
    "max_tokens",
    "prefill_step_size": "give it where the engine is made, LLM(..., max_num_batched_tokens=...)",
}
# How to write the value of an argument, after its name.
_NOTATION = {
    "sampling_params": ", a SamplingParams",
    "adapter_path": ", the folder of the adapters",
} | {name: each.notation for name, each in _DECLARED.items()}


def refuses_unknown_arguments(
    kind: Kind, also: Callable[[], Collection[str]] = tuple
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator that refuses unknown keywords with advice.

    Args:
        kind: of the function, which determines the advice.
        also: returns the names that the function accepts as ``**options``; called lazily.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        names = argument_names(function)
        entry = function.__qualname__.removesuffix(".__init__")

        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            if not kwargs.keys() <= names:
                known = {*names, *also()}
                for name in kwargs:
                    if name not in known:
                        raise TypeError(refusal(entry, kind, name, known))
            return function(*args, **kwargs)

        return checked

    return decorate


def constructor_refuses_unknown_arguments(kind: Kind) -> Callable[[C], C]:
    """:func:`refuses_unknown_arguments` for a class with a generated constructor: a dataclass."""

    def decorate(cls: C) -> C:
        type.__setattr__(cls, "__init__", refuses_unknown_arguments(kind)(vars(cls)["__init__"]))
        return cls

    return decorate


def argument_names(function: Callable[..., object]) -> frozenset[str]:
    """The keywords of a function, without those of its ``**options``."""
    parameters = inspect.signature(function).parameters.values()
    taken = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(each.name for each in parameters if each.kind in taken) - {"self"}


def refusal(entry: str, kind: Kind, name: str, known: Collection[str]) -> str:
    """An error text about the unknown argument ``name`` of ``entry``, with advice, in one line."""
    return f"{entry}() has no argument {name!r}: {_advice(kind, name, known)}"


def _advice(kind: Kind, name: str, known: Collection[str]) -> str:
    ours = OTHER_NAMES.get(name, name)
    for same in (ours, *_ALSO_CALLED.get(ours, ())):
        if same in known:
            return f"use {same}{_NOTATION.get(same, '')}"
    if ours in PARAMS:
        return _place_of_param(kind, ours)
    if ours in ENGINE_OPTIONS:
        notation = _NOTATION.get(ours, "")
        return f"give it where the engine is made, LLM(..., {ours}=...){notation}"
    if name in ADVICE:
        return ADVICE[name]
    if ours in _ELSEWHERE:
        return _ELSEWHERE[ours]
    names = {*known, *PARAMS, *ENGINE_OPTIONS, *ADVICE, *OTHER_NAMES}
    for near in difflib.get_close_matches(name, names, n=1):
        advice = "" if near in known else f" {_advice(kind, near, known)}"
        return f"did you mean {near}?{advice}"
    return f"it takes {', '.join(sorted(known))}"


def _place_of_param(kind: Kind, ours: str) -> str:
    if kind != "generate":
        where = " to generate" if kind in ("engine", "load", "cache") else ""
        return f"give SamplingParams({ours}=...){where}"
    option = "temp" if ours == "temperature" else ours
    if option in SAMPLER_OPTIONS:
        return f"give sampler=make_sampler({option}=...)"
    if ours == "seed":
        return "call mlx.core.random.seed first"
    make = f", or logits_processors=mlx_lm.sample_utils.make_logits_processors({ours}=...)"
    return f"give SamplingParams({ours}=...) to LLM.generate{make if ours in PENALTIES else ''}"
