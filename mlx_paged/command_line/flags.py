"""Flags that programs share, named as those of ``mlx_lm``, and the arguments that they become."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from mlx_paged import flag_values as values
from mlx_paged.config import (
    BLOCK_SIZES,
    DEFAULT_BACKEND,
    DEFAULT_BLOCK_SIZE,
    DEFAULT_CACHE_DIR_SIZE,
    DEFAULT_KV,
    DEFAULT_NUM_DRAFT_TOKENS,
    DEFAULT_NUM_SINK_TOKENS,
    KV_CACHES,
    MAX_DRAFT_TOKENS,
)
from mlx_paged.declarations import Argument, Program
from mlx_paged.sampling_declarations import SAMPLING_PARAMS

EXAMPLE_MODEL = "mlx-community/Qwen3-0.6B-4bit"
DTYPES = ("float32", "float16", "bfloat16")
# Arguments of the library that the flags below are handed on as.
FLAGS = {
    "adapter_path": "--adapter-path",
    "cache_dir": "--cache-dir",
    "cache_dir_size": "--cache-dir-size",
    "cache_dir_ttl": "--cache-dir-ttl",
    "draft_model": "--draft-model",
    "dtype": "--dtype",
    "kv_cache_bytes": "--kv-cache-bytes",
    "kv_format": "--kv-bits",
    "num_sink_tokens": "--num-sink-tokens",
    "max_model_len": "--max-model-len",
    "num_draft_tokens": "--num-draft-tokens",
    "path_or_hf_repo": "--model",
    "tokenizer_path": "--tokenizer",
    "window": "--window",
    "wired_limit": "--wired-limit",
}
# The flags of sampling parameters, and of others that only some programs have, by argument.
SAMPLING = {
    **{name: each.flag_name(name) for name, each in SAMPLING_PARAMS.items() if each.flag},
    "seed": "--seed",
}


def add_declared_flags(
    parser: argparse.ArgumentParser, arguments: Mapping[str, Argument], program: Program
) -> None:
    """Add the flags that ``program`` has for declared arguments; values have the arguments' names.

    A switch that is on by default has a flag that turns it off, and one that has no default both.
    """
    for name, argument in arguments.items():
        flag = argument.flag
        if flag is None or program not in flag.programs:
            continue
        action: dict[str, Any] = {"type": flag.read, "choices": flag.choices}
        if flag.choices is None:
            words = argument.flag_name(name).removeprefix("--")
            action["metavar"] = flag.metavar or words.replace("-", "_").upper()
        if flag.read is None:
            on_off = argparse.BooleanOptionalAction
            action = {"action": on_off if flag.default is None else "store_false"}
        text = flag.help or argument.help.rstrip(".").replace("``", "")
        if flag.read is not None or flag.default is None:
            default = "none" if flag.default is None else str(flag.default)
            text += f" (default: {flag.says or default})"
        parser.add_argument(
            argument.flag_name(name),
            *flag.also,
            dest=name,
            default=flag.default,
            help=text.replace("%", "%%"),
            **action,
        )


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--model",
        help=f"local folder, GGUF file or Hugging Face repo, e.g. {EXAMPLE_MODEL} "
        "(default: the bundled demo model)",
    )
    add(
        "--tokenizer",
        metavar="FOLDER",
        help="folder or Hugging Face repo with the tokenizer (default: the model's own)",
    )
    add(
        "--dtype",
        choices=DTYPES,
        help="dtype of a GGUF file's scales, activations and K/V (default: that of its "
        "matrices, and float32 where they are quantised, so that nothing is lost)",
    )
    add(
        "--adapter-path",
        help="folder with LoRA or DoRA adapters for the model, as mlx-lm trains them",
    )


def add_generation_config_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--no-generation-config",
        action="store_true",
        help="leave the model's generation_config.json out: greedy, unless flags say otherwise",
    )


def chosen_sampling(args: argparse.Namespace, own: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``SamplingParams``: what the flags of sampling say wins over the model's own.

    Args:
        own: what the model's ``generation_config.json`` recommends, by field.
    """
    # Where an answer ends and its seed are not the model's to say.
    names = [name for name in SAMPLING_PARAMS if name in SAMPLING.keys() - {"max_tokens", "seed"}]
    given = {name: getattr(args, name, None) for name in names}
    chosen = {**own, **{name: value for name, value in given.items() if value is not None}}
    if chosen.get("top_p") == 0:
        chosen["top_p"] = 1.0  # As in mlx-lm, 0 is off.
    return chosen


def add_no_thinking_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--no-thinking",
        action="store_true",
        help="ask the model's chat template for an answer without reasoning",
    )


def add_cache_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--kv",
        choices=KV_CACHES,
        default=DEFAULT_KV,
        help="the KV cache: contiguous or paged (default: %(default)s)",
    )
    add(
        "--block-size",
        type=int,
        choices=BLOCK_SIZES,
        default=DEFAULT_BLOCK_SIZE,
        help="tokens per K/V block (default: %(default)s)",
    )
    add(
        "--kv-cache-bytes",
        type=values.budget,
        metavar="N",
        help="K/V budget: bytes (65536, 512M, 2G) or blocks (256blocks) "
        "(default: a share of the memory)",
    )
    add(
        "--kv-bits",
        type=values.kv_bits,
        metavar="N",
        help="quantise the K/V of a paged cache: 8, or for fewer bytes K:8,V:4, or 4, in which "
        "some models' predictions suffer (default: the model's dtype)",
    )
    add(
        "--max-model-len",
        type=values.positive,
        metavar="N",
        help="context limit: tokens of the conversation and its answer (default: the model's own)",
    )
    add(
        "--window",
        type=values.positive,
        metavar="N",
        help="keep the last N tokens, and the first ones, so that the conversation has no end "
        "(default: keep all)",
    )
    add(
        "--num-sink-tokens",
        type=values.whole,
        metavar="M",
        help=f"first tokens to keep beside a window (default: {DEFAULT_NUM_SINK_TOKENS})",
    )


def add_cache_dir_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--cache-dir",
        metavar="FOLDER",
        help="keep K/V on disk, so that prompts find their beginnings after a restart and in other "
        "processes (default: keep none)",
    )
    add(
        "--cache-dir-size",
        type=values.num_bytes,
        metavar="N",
        help=f"the most that the folder takes: bytes (512M, 20G) (default: "
        f"{DEFAULT_CACHE_DIR_SIZE})",
    )
    add(
        "--cache-dir-ttl",
        type=values.duration,
        metavar="T",
        help="how long K/V that nobody uses stay there: 90s, 30m, 12h, 7d or 2w (default: until "
        "their room is needed)",
    )


def add_draft_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--draft-model",
        help="a small model of the same tokenizer, folder or repo, that drafts the next tokens; "
        "without one they are looked up in the conversation",
    )
    add(
        "--num-draft-tokens",
        type=values.drafts,
        metavar="K",
        help=f"verify up to K drafts per step, 0 to {MAX_DRAFT_TOKENS}; the answers are the same "
        f"(default: {DEFAULT_NUM_DRAFT_TOKENS} with a draft model, else 0)",
    )


def add_backend_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backend",
        choices=("auto", "reference", "metal"),
        default=DEFAULT_BACKEND,
        help="operations on the paged cache (default: %(default)s)",
    )


def add_wired_limit_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--wired-limit",
        type=values.wired_limit,
        metavar="N",
        help="memory that macOS may not page out: bytes (512M, 20G) or recommended, for what Metal "
        "recommends; macOS's kernel may panic with it (default: none)",
    )
