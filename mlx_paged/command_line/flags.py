"""Flags that programs share, named as those of ``mlx_lm``, and the arguments that they become."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from mlx_paged.declarations import Argument, Program
from mlx_paged.engine_options import ENGINE_OPTIONS
from mlx_paged.sampling_declarations import SAMPLING_PARAMS
from mlx_paged.sampling_params import SamplingParams

EXAMPLE_MODEL = "mlx-community/Qwen3-0.6B-4bit"
DTYPES = ("float32", "float16", "bfloat16")
# Arguments of the library that the flags below are handed on as.
FLAGS = {
    "adapter_path": "--adapter-path",
    "draft_model": "--draft-model",
    "dtype": "--dtype",
    "path_or_hf_repo": "--model",
    "tokenizer_path": "--tokenizer",
}
# The flags of sampling parameters, and of others that only some programs have, by argument.
SAMPLING = {
    **{name: each.flag_name(name) for name, each in SAMPLING_PARAMS.items() if each.flag},
    "seed": "--seed",
}


def add_declared_flags(
    parser: argparse.ArgumentParser,
    arguments: Mapping[str, Argument],
    defaults: Mapping[str, object],
    program: Program,
) -> None:
    """Add the flags that ``program`` has for declared arguments; values have the arguments' names.

    A switch that is on by default has a flag that turns it off, and one that has no default both.

    Args:
        defaults: those of the library, by argument.
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
            default = defaults[name] if flag.default is None else flag.default
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


def add_sampling_flags(parser: argparse.ArgumentParser, program: Program) -> None:
    add_declared_flags(parser, SAMPLING_PARAMS, vars(SamplingParams()), program)


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


def engine_flags(program: Program) -> dict[str, str]:
    """The flags that a program has for the options of an engine, by option."""
    return {
        name: each.flag_name(name)
        for name, each in ENGINE_OPTIONS.items()
        if each.flag is not None and program in each.flag.programs
    }


def engine_options(args: argparse.Namespace, program: Program) -> dict[str, Any]:
    """The keyword arguments of an engine that the flags of a program say."""
    return {name: getattr(args, name) for name in engine_flags(program)}


def add_engine_flags(parser: argparse.ArgumentParser, program: Program) -> None:
    defaults = {name: each.default for name, each in ENGINE_OPTIONS.items()}
    add_declared_flags(parser, ENGINE_OPTIONS, defaults, program)
    parser.add_argument(
        "--draft-model",
        help="a small model of the same tokenizer, folder or repo, that drafts the next tokens; "
        "without one they are looked up in the conversation",
    )
