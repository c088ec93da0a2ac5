"""Arguments that this package does not have, and what to use instead of them. Imports no MLX.

Calls that came from mlx-lm, vLLM, llama-cpp-python or transformers bring their arguments along.
Such a call is refused with a ``TypeError``, as Python does for unknown keywords, in one line that
names the argument and the way out."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection
from functools import wraps
from typing import Literal, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)

# What a public entry does: makes an engine, asks one, generates as mlx-lm does, and so on.
Kind = Literal["engine", "request", "generate", "params", "cache", "load"]

# Foreign names of arguments that exist here under another name.
OTHER_NAMES: dict[str, str] = {
    **dict.fromkeys(
        ("max_new_tokens", "max_gen_tokens", "max_completion_tokens", "n_predict"), "max_tokens"
    ),
    **dict.fromkeys(
        ("max_kv_size", "max_seq_len", "max_seq_length", "max_length", "n_ctx"), "max_model_len"
    ),
    **dict.fromkeys(("max_context_len", "context_length", "context_window"), "max_model_len"),
    **dict.fromkeys(
        ("gpu_memory_utilization", "kv_cache_memory_bytes", "num_gpu_blocks_override"),
        "kv_cache_bytes",
    ),
    **dict.fromkeys(("swap_space", "cpu_offload_gb", "kv_offloading_size"), "swap_bytes"),
    **dict.fromkeys(("repeat_penalty", "repetition_context_size"), "repetition_penalty"),
    **dict.fromkeys(("num_return_sequences", "best_of"), "n"),
    **dict.fromkeys(("stop_strings", "stop_words", "stop_sequences"), "stop"),
    **dict.fromkeys(("eos_token_id", "eos_token_ids"), "stop_token_ids"),
    **dict.fromkeys(
        ("lora_request", "enable_lora", "lora_path", "adapter", "max_loras"), "adapter_path"
    ),
    **dict.fromkeys(("prefill_chunk_size", "n_batch", "max_prefill_tokens"), "prefill_step_size"),
    **dict.fromkeys(("max_batch_size", "completion_batch_size", "n_parallel"), "max_num_seqs"),
    **dict.fromkeys(
        ("model_path", "model_name", "repo_id", "model_id", "pretrained_model_name_or_path"),
        "model",
    ),
    **dict.fromkeys(
        ("prompt_token_ids", "input_ids", "inputs", "prompt_tokens", "text", "texts"), "prompt"
    ),
    "temp": "temperature",
    "random_seed": "seed",
    "enable_prefix_cache": "enable_prefix_caching",
    "sampling_parameters": "sampling_params",
    "generation_config": "sampling_params",
}

_NO_SPECULATION = "there is no speculative decoding; leave it out"
_NO_KV_QUANTISATION = "K/V are kept in the dtype of the model's activations; leave it out"
_NO_PARALLELISM = "a model runs on the GPU of one machine; leave it out"
_NO_WEIGHT_CHOICE = (
    "weights run in the dtype and quantisation that they are stored in; leave it out"
)
_NO_BEAMS = "there is no beam search; leave it out"
_NO_EAGER = "there is no graph to compile or to capture; leave it out"
_NO_FILTER = "the filters are top_k, top_p and min_p; leave it out"
_NO_GRAMMAR = "constrained output needs a logits processor of your own; give logits_processors"
_NO_MEDIA = "only text and token ids are supported; leave it out"
_NO_MASK = "sequences are never padded; leave it out"
_TEMPLATE = "give chat_template_kwargs, which are the variables of the chat template"
_LOADING = "load the model first, model, tokenizer = mlx_paged.load(...), and give both"

# Foreign names of what is not here at all, or is here in another way; ``{entry}`` is the function
# called.
ADVICE: dict[str, str] = {
    "prompt_cache": "a conversation goes on with session=Session(...), and an engine shares equal beginnings by itself",
    **dict.fromkeys(
        ("kv_bits", "kv_group_size", "quantized_kv_start", "kv_cache_dtype"), _NO_KV_QUANTISATION
    ),
    **dict.fromkeys(("calculate_kv_scales", "type_k", "type_v"), _NO_KV_QUANTISATION),
    **dict.fromkeys(("draft_model", "num_draft_tokens", "speculative_config"), _NO_SPECULATION),
    **dict.fromkeys(
        ("speculative_model", "num_speculative_tokens", "assistant_model"), _NO_SPECULATION
    ),
    **dict.fromkeys(
        ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"), _NO_PARALLELISM
    ),
    **dict.fromkeys(
        ("distributed_executor_backend", "device", "device_map", "n_gpu_layers"), _NO_PARALLELISM
    ),
    **dict.fromkeys(("n_threads", "stream_device", "tensor_split", "main_gpu"), _NO_PARALLELISM),
    **dict.fromkeys(
        ("dtype", "torch_dtype", "quantization", "quantize", "load_format"), _NO_WEIGHT_CHOICE
    ),
    **dict.fromkeys(("load_in_4bit", "load_in_8bit", "quantization_config"), _NO_WEIGHT_CHOICE),
    **dict.fromkeys(("enforce_eager", "compilation_config", "max_seq_len_to_capture"), _NO_EAGER),
    **dict.fromkeys(("num_beams", "use_beam_search", "beam_width", "length_penalty"), _NO_BEAMS),
    **dict.fromkeys(("early_stopping", "num_beam_groups"), _NO_BEAMS),
    **dict.fromkeys(
        ("typical_p", "tfs_z", "mirostat_mode", "mirostat_tau", "mirostat_eta"), _NO_FILTER
    ),
    **dict.fromkeys(
        ("xtc_probability", "xtc_threshold", "xtc_special_tokens", "top_a"), _NO_FILTER
    ),
    **dict.fromkeys(
        ("guided_decoding", "structured_outputs", "grammar", "response_format"), _NO_GRAMMAR
    ),
    **dict.fromkeys(("bad_words", "allowed_token_ids", "min_tokens", "bad_words_ids"), _NO_GRAMMAR),
    **dict.fromkeys(("prompt_embeds", "input_embeddings", "inputs_embeds"), _NO_MEDIA),
    **dict.fromkeys(
        ("multi_modal_data", "mm_processor_kwargs", "limit_mm_per_prompt", "images"), _NO_MEDIA
    ),
    **dict.fromkeys(("attention_mask", "pad_token_id", "padding", "position_ids"), _NO_MASK),
    **dict.fromkeys(
        ("chat_template", "add_generation_prompt", "continue_final_message", "tools"), _TEMPLATE
    ),
    **dict.fromkeys(("enable_thinking", "chat_template_content_format", "documents"), _TEMPLATE),
    **dict.fromkeys(
        ("revision", "tokenizer_config", "model_config", "hf_overrides", "lazy"), _LOADING
    ),
    **dict.fromkeys(("tokenizer_mode", "tokenizer_revision", "skip_tokenizer_init"), _LOADING),
    "trust_remote_code": "code of a model's repository is never run; leave it out",
    **dict.fromkeys(("download_dir", "cache_dir"), "the Hugging Face cache is used, set HF_HOME"),
    **dict.fromkeys(
        ("hf_token", "token", "use_auth_token"), "the Hugging Face login is used, set HF_TOKEN"
    ),
    "do_sample": "a temperature above 0 samples, and 0 takes the most likely token",
    "use_cache": "there is always a K/V cache; leave it out",
    "enable_chunked_prefill": "long prompts are always computed in chunks of max_num_batched_tokens; leave it out",
    "stream": "stream_generate and AsyncEngine give an answer piece by piece",
    "streamer": "stream_generate and AsyncEngine give an answer piece by piece",
    "formatter": "stream_generate gives the answer piece by piece, to be printed in any form",
    "stopping_criteria": "leave the loop over stream_generate, or give SamplingParams(stop=...)",
    "logits_processor": "give logits_processors, a list of functions",
    "echo": "the output has the prompt, too; leave it out",
    **dict.fromkeys(
        ("disable_log_stats", "disable_log_requests"), "nothing is logged; leave it out"
    ),
    "prompt_logprobs": "log-probabilities of the prompt are not computed; leave it out",
    "truncate_prompt_tokens": "a prompt is never cut; shorten it before",
    **dict.fromkeys(
        ("detokenize", "skip_special_tokens"),
        "the output has token_ids beside the text; leave it out",
    ),
    "strict": "weights must always fit the model; leave it out",
}

SAMPLER_OPTIONS = ("temp", "top_p", "top_k", "min_p")
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias")
PARAMS = (
    *(
        "n",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        *PENALTIES,
        "stop",
        "stop_token_ids",
        "ignore_eos",
    ),
    *("max_tokens", "logprobs", "logits_processors"),
)
ENGINE_OPTIONS = (
    *(
        "block_size",
        "kv_cache_bytes",
        "backend",
        "swap_bytes",
        "max_model_len",
        "max_num_seqs",
        "priority_steps",
    ),
    *("max_num_batched_tokens", "watermark", "enable_prefix_caching"),
)
# One argument, as different functions call it.
_ALSO_CALLED = {
    "temperature": ("temp",),
    "prompt": ("prompts",),
    "model": ("path_or_hf_repo",),
    "sampling_params": ("params",),
    "max_model_len": ("kv_cache_bytes",),
}
# What one function has and others do not.
_ELSEWHERE = {
    "model": _LOADING,
    "adapter_path": "adapters belong to a model, load(..., adapter_path=...)",
    "prompt": "give it to generate",
    "sampling_params": "SamplingParams are for LLM.generate; mlx-lm's functions take sampler and max_tokens",
    "prefill_step_size": "give it where the engine is made, LLM(..., max_num_batched_tokens=...)",
}


def refuses_unknown_arguments(
    kind: Kind, also: Callable[[], Collection[str]] = tuple
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator: keywords that a function does not have are refused by name, with the way out.

    Args:
        kind: what the function does, for the way out.
        also: names that it takes by ``**options``; called at the first unknown name.
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
    """As :func:`refuses_unknown_arguments`, for a class whose constructor is made for it, such as a
    dataclass.
    """

    def decorate(cls: C) -> C:
        type.__setattr__(cls, "__init__", refuses_unknown_arguments(kind)(vars(cls)["__init__"]))
        return cls

    return decorate


def argument_names(function: Callable[..., object]) -> frozenset[str]:
    """The names by which a function takes arguments; of ``**options`` it knows nothing."""
    parameters = inspect.signature(function).parameters.values()
    taken = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(parameter.name for parameter in parameters if parameter.kind in taken) - {
        "self"
    }


def refusal(entry: str, kind: Kind, name: str, known: Collection[str]) -> str:
    """Why ``entry`` does not take ``name``, and what to do, in one line."""
    return f"{entry}() has no argument {name!r}: {_way_out(kind, name, known)}"


def _way_out(kind: Kind, name: str, known: Collection[str]) -> str:
    ours = OTHER_NAMES.get(name, name)
    for same in (ours, *_ALSO_CALLED.get(ours, ())):
        if same in known:
            return f"use {same}" + _notation(same)
    if ours in PARAMS:
        return _place_of_param(kind, ours)
    if ours in ENGINE_OPTIONS:
        return f"give it where the engine is made, LLM(..., {ours}=...)" + _notation(ours)
    if name in ADVICE:
        return ADVICE[name]
    if ours in _ELSEWHERE:
        return _ELSEWHERE[ours]
    near = difflib.get_close_matches(
        name, {*known, *PARAMS, *ENGINE_OPTIONS, *ADVICE, *OTHER_NAMES}, n=1
    )
    if not near:
        return f"it takes {', '.join(sorted(known))}"
    return f"did you mean {near[0]}?" + (
        "" if near[0] in known else f" {_way_out(kind, near[0], known)}"
    )


def _place_of_param(kind: Kind, ours: str) -> str:
    if kind == "generate":
        option = {"temperature": "temp"}.get(ours, ours)
        if option in SAMPLER_OPTIONS:
            return f"give sampler=make_sampler({option}=...)"
        return {"seed": "call mlx.core.random.seed first"}.get(
            ours, f"give SamplingParams({ours}=...) to LLM.generate" + _penalty_way_out(ours)
        )
    return f"give SamplingParams({ours}=...)" + (
        " to generate" if kind in ("engine", "load", "cache") else ""
    )


def _penalty_way_out(ours: str) -> str:
    if ours not in PENALTIES:
        return ""
    return f", or logits_processors=mlx_lm.sample_utils.make_logits_processors({ours}=...)"


def _notation(ours: str) -> str:
    return {
        "kv_cache_bytes": ", such as '2G' or '256blocks'",
        "swap_bytes": ", such as '4G'",
        "max_model_len": " for tokens, or kv_cache_bytes for memory",
        "sampling_params": ", a SamplingParams",
        "adapter_path": ", the folder of the adapters",
    }.get(ours, "")
