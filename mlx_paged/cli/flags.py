"""The flags that the programs share, with the names of ``mlx_lm``'s, and their values as arguments
of the library.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mlx_paged.options.argument_values import Argument, Option, Program
from mlx_paged.options.engine_options import ENGINE_OPTIONS, LAUNCH_OPTIONS
from mlx_paged.options.sampling_declarations import SAMPLING_PARAMS
from mlx_paged.options.sampling_params import SamplingParams

if TYPE_CHECKING:
    from mlx.nn.layers.base import Module
    from mlx_lm.tokenizer_utils import TokenizerWrapper

# The flags by the library's arguments; "model" and "tokenizer" are words of many errors.
FLAGS = {name: each.flag_name(name) for name, each in LAUNCH_OPTIONS.items()} | {
    "path_or_hf_repo": "--model",
    "tokenizer_path": "--tokenizer",
}
del FLAGS["model"], FLAGS["tokenizer"]
# The flags of the sampling parameters, which only some programs have, by parameter.
SAMPLING = {
    **{name: each.flag_name(name) for name, each in SAMPLING_PARAMS.items() if each.flag},
    "seed": "--seed",
}
NO_FOLDER = "none"  # as --cache-dir; a folder of that name is ./none


# The groups of a program's help, by argument. The program's own flags that are not listed here form
# another group.
_GROUPS = {
    "model": """model tokenizer dtype adapter_path adapters max_adapters max_adapter_rank
        no_generation_config force skip_check backend""",
    "answers": "seed deterministic system_prompt no_thinking",  # and the sampling parameters
    "memory and context": """kv_cache_bytes max_model_len kv_format window num_sink_tokens
        wired_limit preallocate block_size kv swap_bytes""",
    "what is kept": """cache_dir cache_dir_size cache_dir_ttl cache_dir_writes prompt_cache_file
        allow_other_model enable_prefix_caching num_history_tokens""",
    "speed": """draft_model num_draft_tokens prefill_step_size prefill_step_seconds max_num_seqs
        max_num_batched_tokens max_num_mixed_tokens mixed_step_seconds watermark priority_steps
        run_ahead matmul""",
}


def add_flags(
    parser: argparse.ArgumentParser, program: Program, own: Mapping[str, Option]
) -> argparse._ArgumentGroup:
    """Add the flags of a program, in groups; returns the group of its own flags.

    Args:
        own: the options that only this program has.
    """
    groups = {title: parser.add_argument_group(title) for title in (*_GROUPS, "further ones")}
    groups[program] = parser.add_argument_group(f"the {program}")
    titles = {name: title for title, names in _GROUPS.items() for name in names.split()}

    def group_of(name: str) -> argparse._ArgumentGroup:
        return groups[titles.get(name, program if name in own else "further ones")]

    engine = {name: ENGINE_OPTIONS[name] for name in engine_flags(program)}
    for name, option in {**LAUNCH_OPTIONS, **own, **engine}.items():
        given = option.flag and option.flag.default
        default = option.default if given is None else given
        _add_flag(group_of(name), name, option, default, option.default_text or default)
    for name, param in SAMPLING_PARAMS.items():
        if param.flag is not None and program in param.flag.programs:
            # A parameter that the model may set is None if its flag is not given.
            says = param.flag.default_text or getattr(SamplingParams(), name)
            _add_flag(groups["answers"], name, param, param.flag.default, says)
    return groups[program]


def _add_flag(
    group: argparse._ArgumentGroup, name: str, argument: Argument, default: object, says: object
) -> None:
    """Add the flag of a declared argument, whose name is its ``dest``.

    A bool has a flag for the value that is not its default, or flags for both if it has no default.
    An argument with the default ``()`` may be given several times.

    Args:
        default: the value without the flag.
        default_text: what the help says about the default.
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
    action |= {"dest": name, "default": default, "help": text.replace("%", "%%")}
    group.add_argument(flag_name, *flag.also, **action)


def chosen_sampling(args: argparse.Namespace, own: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``SamplingParams``: the sampling flags override the model's recommendation.

    Args:
        own: what the model's ``generation_config.json`` recommends, by field.
    """
    # The model decides neither the length of an answer nor its seed.
    names = SAMPLING.keys() - {"max_tokens", "seed"}
    given = {name: value for name, value in vars(args).items() if name in names}
    return {**own, **{name: value for name, value in given.items() if value is not None}}


def engine_flags(program: Program) -> dict[str, str]:
    """The flags that a program has for the options of an engine, by option."""
    return {
        name: each.flag_name(name)
        for name, each in ENGINE_OPTIONS.items()
        if each.flag is not None and program in each.flag.programs
    }


def engine_options(args: argparse.Namespace, program: Program) -> dict[str, Any]:
    """The keyword arguments of an engine that the flags of a program set."""
    options = {name: getattr(args, name) for name in engine_flags(program)}
    if options["cache_dir"] == NO_FOLDER:
        options["cache_dir"] = None
    return options


def load_model(
    args: argparse.Namespace, program: Program, tokenizer_config: dict[str, Any] | None = None
) -> tuple[Module, TokenizerWrapper, dict[str, Any], dict[str, Any]]:
    """Load the model that the flags name, which is downloaded if necessary; returns it, its
    tokenizer, the engine's options and the sampling, by field of ``SamplingParams``.

    Raises:
        ValueError, RuntimeError: the model can't be loaded, or an option is invalid.
    """
    from mlx_paged import loading
    from mlx_paged.distributed import launched_ranks

    folder = loading.demo_model_path()
    if args.model is not None:
        folder = loading.find_model_for(args.model, args.force)
    own = {} if args.no_generation_config else loading.read_sampling_defaults(folder)
    options = engine_options(args, program)
    model, tokenizer = loading.load_for(
        launched_ranks(),
        folder,
        tokenizer_config=tokenizer_config,
        model_config=loading.dtype_config(folder, args.dtype),
        adapter_path=args.adapter_path,
        tokenizer_path=args.tokenizer,
        skip_check=args.skip_check,
        engine_options=options,
        refuses_too_large=not args.force,
    )
    options["draft_model"] = loading.load_draft_model(
        args.draft_model, tokenizer, model, skip_check=args.skip_check
    )
    return model, tokenizer, options, chosen_sampling(args, own)
