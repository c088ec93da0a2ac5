"""The chat's flags, named after those of ``mlx_lm.chat``, and the settings that /set changes. Does
not import MLX.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from mlx_paged.argument_values import AT_LEAST_0, AT_LEAST_1, BOOL, Domain, Option, one_of, such
from mlx_paged.command_line import flags, parser
from mlx_paged.config import DEFAULT_MAX_NUM_BATCHED_TOKENS
from mlx_paged.errors import one_line
from mlx_paged.sampling_declarations import SAMPLING_PARAMS
from mlx_paged.sampling_params import SamplingParams
from mlx_paged.standard_streams import write

_TEXT = such("a text", lambda value: isinstance(value, str))
OPTIONS = {
    "seed": Option("random seed for sampling", AT_LEAST_0, default=0),
    "system_prompt": Option("system prompt of the conversation", _TEXT),
    "prompt_cache_file": Option(
        "continue the prompt whose K/V and token ids are in this file, such as a snapshot",
        replace(_TEXT, metavar="FILE"),
    ),
    "allow_other_model": Option(
        "use --prompt-cache-file with --model even if the file names another model",
        BOOL,
        default=False,
    ),
    "hide_thinking": Option("hide the model's reasoning (<think>)", BOOL, default=False),
    "prefill_step_size": Option(
        "prompt tokens computed at a time",
        AT_LEAST_1,
        says=f"as many as take --prefill-step-seconds, up to {DEFAULT_MAX_NUM_BATCHED_TOKENS}",
    ),
    "plain": Option(
        "write plain text to a terminal, for screen readers too: no markdown, no dimmed or redrawn "
        "lines",
        BOOL,
        default=False,
    ),
    "json": Option(
        "with a message: write the answer and its statistics, or an error, as one JSON object",
        BOOL,
        default=False,
    ),
    "verbose": Option(
        "print all statistics of the model, the cache and each answer", BOOL, default=False
    ),
}
# The flags by the library's arguments, for errors. "kv" is left out: errors quote kv='basic'.
FLAGS = {
    **flags.FLAGS,
    **{name: flag for name, flag in flags.engine_flags("chat").items() if name != "kv"},
    "max_num_batched_tokens": "--prefill-step-size",
}


def setup_arg_parser(prog: str | None = None) -> parser.Parser:
    """The argument parser of the chat, for a program of this name."""
    chat = _Parser(
        prog=prog or _name_as_called(),
        description="Chat with a model in the terminal, or ask it once.",
        flags=flags.SAMPLING | FLAGS,
        usage="%(prog)s [options] [model] [message]",
    )
    chat.add_argument(
        "words",
        nargs="*",
        metavar="model, message",
        help="the model, as --model, or a single word that is a path or a model on this machine; "
        "answer this message and exit; - reads it, of any number of lines, from stdin",
    )
    flags.add_flags(chat, "chat", OPTIONS)
    chat.add_version()
    return chat


def error_line(error: BaseException) -> str:
    """The text of an error on one line, with flags in place of the library's arguments."""
    return parser.error_line(error, FLAGS)


def write_json(content: Mapping[str, Any]) -> None:
    """Write one line of JSON to stdout, in ASCII, which every locale can write."""
    write(json.dumps(content) + "\n")


class _Parser(parser.Parser):
    """With ``--json``, errors in the arguments are also written to stdout as JSON.

    ``words`` of the result are those that are no flags, and ``is_message`` says that the only one
    comes after ``--``.
    """

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        given = list(sys.argv[1:] if args is None else args)
        self._writes_json = "--json" in given
        known, rest = super().parse_known_args(given, namespace)
        if not any(word.startswith("-") for word in rest):
            # argparse takes the words before the next flag only.
            known.words, rest = [*known.words, *rest], []
        known.is_message = len(known.words) == 1 and given[-2:] == ["--", *known.words]
        return known, rest

    def error(self, message: str) -> NoReturn:
        if self._writes_json:
            write_json({"error": one_line(message, parser.MAX_ERROR)})
        super().error(message)


def _name_as_called() -> str:
    """The command that the user typed, as far as it is known."""
    name = Path(sys.argv[0]).name
    return name if name == "mlx_paged.chat" else "python -m mlx_paged.chat"


# What /set changes


# Sampling parameters that have a flag, by their names in /set.
_FIELDS = {
    each.flag_name(name).removeprefix("--"): name
    for name, each in SAMPLING_PARAMS.items()
    if each.flag is not None
}
_SHOWN_APART = ("temperature", "xtc_probability", "xtc_threshold", "max_tokens")
_DEFAULTS = SamplingParams()
# The settings by name, with their values.
VARIABLES: dict[str, Domain[Any]] = {
    **{name: SAMPLING_PARAMS[field].flag_domain for name, field in _FIELDS.items()},
    "seed": AT_LEAST_0,
    "thinking": replace(one_of("show", "hide"), what="show or hide", parse=str.lower),
}


class Settings:
    """The settings that can be changed while the chat runs.

    Args:
        args: the flags; a sampling flag that was not given is ``None``.
        own: the model's recommended sampling, by field of ``SamplingParams``; flags override it.

    Attributes:
        sampling: parameters of the next answer, without its seed.
        show_thinking: whether reasoning is shown.
        from_model: names of the sampling settings that the model recommends.
    """

    def __init__(self, args: argparse.Namespace, own: Mapping[str, Any]):
        chosen = flags.chosen_sampling(args, own)
        # The text is searched for reasoning marks, which may be special tokens.
        self.sampling = SamplingParams(
            max_tokens=args.max_tokens, skip_special_tokens=False, **chosen
        )
        self.show_thinking = not args.hide_thinking
        self.from_model = [canonical_name(name) for name in own if getattr(args, name) is None]
        self.set_seed(args.seed)

    def set_seed(self, seed: int) -> None:
        self.seed = seed
        self._seeds = random.Random(seed)

    def spare_from_xtc(self, token_ids: Sequence[int]) -> None:
        """Exempt these tokens from XTC."""
        self.sampling = replace(self.sampling, xtc_special_tokens=token_ids)

    def next_params(self) -> SamplingParams:
        """The parameters of the next answer, with a new seed."""
        return replace(self.sampling, seed=self._seeds.getrandbits(63))

    def describe_sampling(self) -> str:
        """``"greedy"``, or the temperature and the active filters."""
        sampling = self.sampling
        if sampling.is_greedy:
            return "greedy"
        shown = [f"temp {sampling.temperature:g}"]
        for name, variable in _FIELDS.items():
            value = getattr(sampling, variable)
            if variable not in _SHOWN_APART and value != getattr(_DEFAULTS, variable):
                shown.append(f"{name} {_in_words(value)}")
        if sampling.xtc_probability:
            shown.append(f"xtc {sampling.xtc_probability:g} above {sampling.xtc_threshold:g}")
        return ", ".join(shown)

    def get(self, name: str) -> str:
        """The value of a setting as text; raises ``ValueError`` for an unknown name."""
        _check_name(name)
        if name == "thinking":
            return "show" if self.show_thinking else "hide"
        return _in_words(self.seed if name == "seed" else getattr(self.sampling, _FIELDS[name]))

    def set(self, name: str, text: str) -> None:
        """Change one setting.

        Raises:
            ValueError: the name is unknown, or the value is invalid.
        """
        _check_name(name)
        try:
            value = VARIABLES[name].read_flag(text)
        except argparse.ArgumentTypeError as error:
            raise ValueError(f"{name} {error}") from error
        if name == "thinking":
            self.show_thinking = value == "show"
        elif name == "seed":
            self.set_seed(value)
        else:
            self.sampling = replace(self.sampling, **{_FIELDS[name]: value})
        if name in self.from_model:
            self.from_model.remove(name)


def canonical_name(name: str) -> str:
    """``top_p``, ``TOP-P`` and ``--top-p`` are ``top-p``; ``temperature`` is ``temp``."""
    name = name.lower().lstrip("-").replace("_", "-")
    return "temp" if name == "temperature" else name


def _check_name(name: str) -> None:
    if name not in VARIABLES:
        raise ValueError(f"unknown setting {name!r}; the settings are {', '.join(VARIABLES)}")


def _in_words(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
