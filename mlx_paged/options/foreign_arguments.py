"""What to use here in the place of other projects' arguments. Does not import MLX.

Calls that were written for mlx-lm, vLLM, llama-cpp-python or transformers may have arguments that
are unknown here. As Python does, they raise ``TypeError``, in one line that says what to use. The
command lines say it about unknown flags.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Iterable
from functools import wraps
from typing import TypedDict, TypeVar

from mlx_paged.options.config import KV_BITS_LISTED
from mlx_paged.options.engine_options import ENGINE_OPTIONS
from mlx_paged.options.sampling_declarations import SAMPLING_PARAMS

C = TypeVar("C", bound=type)

_LOADING = "load the model first, model, tokenizer = mlx_paged.load(...), and give both"

# Other projects' names, separated by blanks, by what to use: the name of an argument of this
# package, or advice if there is no such argument.
NAMES_ELSEWHERE = {
    "adapter": "lora_request lora_name",
    "adapter_path": "lora_path",
    "adapters": "enable_lora lora_modules lora_paths",
    "max_adapters": "max_loras max_cpu_loras max_loras_per_batch",
    "max_adapter_rank": "max_lora_rank",
    "bad_words": "bad_words_ids no_bad_words",
    "cache_dir": "kv_transfer_config hicache_storage_backend slot_save_path",
    "draft_model": "speculative_model assistant_model",
    "enable_prefix_caching": "enable_prefix_cache",
    "include_stop_str_in_output": "no_stop_trim",
    "kv_cache_bytes": "gpu_memory_utilization kv_cache_memory_bytes num_gpu_blocks_override",
    "kv_format": "kv_bits kv_cache_dtype type_k type_v",
    "max_model_len": (
        "max_seq_len max_seq_length max_length n_ctx ctx_size max_context_len context_length "
        "context_window"
    ),
    "max_num_seqs": (
        "max_batch_size batch_size completion_batch_size decode_concurrency n_parallel parallel"
    ),
    "max_tokens": "max_new_tokens max_gen_tokens max_completion_tokens n_predict",
    "min_tokens": "min_new_tokens min_length",
    "model": "model_path model_name repo_id model_id pretrained_model_name_or_path",
    "n": "num_return_sequences best_of",
    "num_draft_tokens": "num_speculative_tokens prompt_lookup_num_tokens",
    "num_sink_tokens": "keep num_attention_sinks attention_sink_size n_keep",
    "prefill_step_size": "prefill_chunk_size n_batch max_prefill_tokens",
    "prompt": "prompt_token_ids input_ids inputs prompt_tokens text texts",
    "repetition_penalty": "repeat_penalty repetition_context_size",
    "run_ahead": "async_scheduling",
    "sampling_params": "sampling_parameters generation_config",
    "seed": "random_seed",
    "stop": "stop_strings stop_words stop_sequences",
    "stop_token_ids": "eos_token_id eos_token_ids stop_tokens",
    "structured_outputs": (
        "guided_decoding response_format grammar guided_json guided_regex guided_choice "
        "guided_grammar json_schema"
    ),
    "swap_bytes": "swap_space cpu_offload_gb kv_offloading_size",
    "temperature": "temp",
    "thinking_token_budget": "thinking_budget reasoning_budget budget_tokens",
    "tier": "kv_connector",
    "window": "max_kv_size sliding_window attention_window",
    "an engine reuses the K/V of common prefixes by itself: keep one LLM, and give it the "
    "whole conversation": "prompt_cache",
    "K/V are quantised as they are written, in groups of 64, or 32 where a width needs it; "
    "give kv_format alone": "kv_group_size quantized_kv_start calculate_kv_scales",
    "give draft_model and num_draft_tokens instead": "speculative_config",
    "each machine has one GPU; mlx.launch starts the program on several, whose ranks share a "
    "model": (
        "tensor_parallel_size pipeline_parallel_size distributed_executor_backend tensor_split"
    ),
    "run a program on each machine, and distribute the requests among them": "data_parallel_size",
    "a model runs on the one GPU of its machine; leave it out": (
        "device device_map n_gpu_layers n_threads stream_device main_gpu"
    ),
    "weights run in the dtype and quantisation that they are stored in; leave it out": (
        "dtype torch_dtype quantization quantize load_format load_in_4bit load_in_8bit "
        "quantization_config"
    ),
    "a decode is replayed from a trace where that is faster and gives the same bits; leave it "
    "out": "enforce_eager compilation_config max_seq_len_to_capture",
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
    "leave the loop over stream_generate, or give SamplingParams(stop=...)": "stopping_criteria",
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
# What to use, by another project's name.
INSTEAD = {name: ours for ours, names in NAMES_ELSEWHERE.items() for name in names.split()}

# How to write the value of an argument, after its name.
_NOTATION = {
    "adapter": ", the name of an adapter that LLM(..., adapters={name: folder}) has loaded",
    "adapter_path": ", the folder of the adapters",
    "adapters": ", a dict of names with their folders",
    "cache_dir": ", a folder for K/V on disk; that of models is the Hugging Face cache, HF_HOME",
    "kv_cache_bytes": ", such as '2G' or '256blocks'",
    "kv_format": f": {KV_BITS_LISTED} or 'K:8,V:4'",
    "max_model_len": " for tokens, or kv_cache_bytes for memory",
    "sampling_params": ", a SamplingParams",
    "structured_outputs": ", a StructuredOutputsParams",
    "swap_bytes": ", such as '4G'",
    "window": ", the tokens that are kept",
}
# One argument, as other functions call it.
_ALSO_CALLED = {
    "temperature": "temp",
    "prompt": "prompts",
    "model": "path_or_hf_repo",
    "sampling_params": "params",
    "max_model_len": "kv_cache_bytes",
}
# Advice about arguments that only other functions have, and that are not declared.
_ONLY_THERE = {
    "model": _LOADING,
    "adapter": "give it to generate: LLM(..., adapters={name: folder}).generate(..., adapter=name)",
    "adapter_path": "adapters belong to a model, load(..., adapter_path=...)",
    "prompt": "give it to generate",
    "sampling_params": "SamplingParams are for LLM.generate; mlx-lm's functions take sampler and "
    "max_tokens",
    "prefill_step_size": "give it where the engine is made, LLM(..., max_num_batched_tokens=...)",
}
SAMPLER_OPTIONS = (
    "temp", "top_p", "top_k", "min_p", "xtc_probability", "xtc_threshold", "xtc_special_tokens",
)  # fmt: skip
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias")


class NoOptions(TypedDict):
    """The keyword arguments of a function after those that it names: none.

    With ``**unknown: Unpack[NoOptions]``, type checkers refuse other keywords, and the function
    itself does so with advice.
    """


def refuse_unknown(
    entry: Callable[..., object], given: Iterable[str], options: Collection[str] = ()
) -> None:
    """Refuse a keyword that a public function does not have, with advice in one line.

    Args:
        entry: the function, or the class.
        given: the keywords that it received beside those of its signature.
        options: which of these it has.

    Raises:
        TypeError: names the first one that is not among ``options``.
    """
    for name in given:
        if name not in options:
            known = {*argument_names(entry), *options}
            raise TypeError(
                f"{entry.__qualname__}() has no argument {name!r}: {advice(name, known)}"
            )


def constructor_refuses_unknown(cls: C) -> C:
    """:func:`refuse_unknown` in the generated constructor of a dataclass."""
    construct, names = cls.__init__, argument_names(cls)  # type: ignore[misc]

    @wraps(construct)
    def __init__(self: object, *args: object, **given: object) -> None:
        refuse_unknown(cls, given, names)
        construct(self, *args, **given)

    type.__setattr__(cls, "__init__", __init__)
    return cls


def argument_names(function: Callable[..., object]) -> frozenset[str]:
    """The keywords of a function, without those of its ``**options``."""
    parameters = inspect.signature(function).parameters.values()
    taken = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(each.name for each in parameters if each.kind in taken) - {"self"}


def advice(name: str, known: Collection[str]) -> str:
    """What to use in the place of ``name`` in a call of a function that has the arguments
    ``known``.
    """
    ours = INSTEAD.get(name, name)
    for same in (ours, _ALSO_CALLED.get(ours, "")):
        if same in known:
            return f"use {same}{_NOTATION.get(same, '')}"
    if ours in SAMPLING_PARAMS:
        return _place_of_param(ours, known)
    if ours in ENGINE_OPTIONS:
        notation = _NOTATION.get(ours, "")
        return f"give it where the engine is made, LLM(..., {ours}=...){notation}"
    if ours in _ONLY_THERE:
        return _ONLY_THERE[ours]
    if name in INSTEAD:
        return ours
    names = {*known, *SAMPLING_PARAMS, *ENGINE_OPTIONS, *INSTEAD}
    for near in difflib.get_close_matches(name, names, n=1):
        more = "" if near in known else f" {advice(near, known)}"
        return f"did you mean {near}?{more}"
    return f"it takes {', '.join(sorted(known))}"


def _place_of_param(ours: str, known: Collection[str]) -> str:
    if "sampler" not in known:  # unlike mlx-lm's functions
        takes_params = "params" in known or "sampling_params" in known
        return f"give SamplingParams({ours}=...){'' if takes_params else ' to generate'}"
    option = "temp" if ours == "temperature" else ours
    if option in SAMPLER_OPTIONS:
        return f"give sampler=make_sampler({option}=...)"
    if ours == "seed":
        return "call mlx.core.random.seed first"
    make = f", or logits_processors=mlx_lm.sample_utils.make_logits_processors({ours}=...)"
    return f"give SamplingParams({ours}=...) to LLM.generate{make if ours in _PENALTIES else ''}"
