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


def add_flag(
    parser: argparse.ArgumentParser, name: str, argument: Argument, default: object, says: object
) -> None:
    """Add the flag of a declared argument; its value has the argument's name.

    A switch has a flag that turns it on or off, whichever is not the default, and one that has no
    default both. What has several values is a list of them.

    Args:
        default: where the flag is not given.
        says: of the default, or that itself.
    """
    flag = argument.flag
    assert flag is not None
    flag_name, domain = argument.flag_name(name), argument.flag_domain
    text = flag.help or argument.help.rstrip(".").replace("``", "")
    metavar = domain.metavar or flag_name.removeprefix("--").replace("-", "_").upper()
    action: dict[str, Any] = {"type": domain.read_flag, "metavar": metavar}
    if isinstance(default, bool):
        action = {"action": "store_false" if default else "store_true"}
    elif default == ():
        default = []
        action["action"] = "append"
    else:
        words = f"{says:g}" if isinstance(says, float) else str("none" if says is None else says)
        text += f" (default: {words.replace('`', '')})"
    if domain.choices is not None:
        action = {"type": domain.parse, "choices": domain.choices}
    elif domain.parse is bool and default is None:
        action = {"action": argparse.BooleanOptionalAction}
    parser.add_argument(
        flag_name,
        *flag.also,
        dest=name,
        default=default,
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
    """Add the flags of sampling parameters; one that is not given is ``None``, if the model may set
    it.
    """
    for name, each in SAMPLING_PARAMS.items():
        if each.flag is not None and program in each.flag.programs:
            says = each.flag.says or getattr(SamplingParams(), name)
            add_flag(parser, name, each, each.flag.default, says)


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
    # The model does not decide where an answer ends, nor its seed.
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
    """The keyword arguments of an engine that the flags of a program set."""
    return {name: getattr(args, name) for name in engine_flags(program)}


def add_engine_flags(parser: argparse.ArgumentParser, program: Program) -> None:
    for name in engine_flags(program):
        each = ENGINE_OPTIONS[name]
        given = each.flag and each.flag.default
        default = each.default if given is None else given
        add_flag(parser, name, each, default, each.says or default)
    parser.add_argument(
        "--draft-model",
        help="a small model of the same tokenizer, folder or repo, that drafts the next tokens; "
        "without one they are looked up in the conversation",
    )
