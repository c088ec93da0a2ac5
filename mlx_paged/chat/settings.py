"""How answers are sampled and shown: the model's defaults, the flags, and what /set changes."""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from mlx_paged.command_line.flags import chosen_sampling
from mlx_paged.domains import AT_LEAST_0
from mlx_paged.sampling_declarations import SAMPLING_PARAMS
from mlx_paged.sampling_params import SamplingParams


class Settings:
    """What can be changed while the chat runs.

    Args:
        args: the flags; a sampling flag that was not given is ``None``.
        own: what the model's authors recommend, by field of ``SamplingParams``; flags win over it.

    Attributes:
        sampling: how the next answer is sampled, but for its seed.
        show_thinking: whether reasoning is shown.
        from_model: names of the sampling settings that are the model's recommendation.
    """

    def __init__(self, args: argparse.Namespace, own: Mapping[str, Any]):
        chosen = chosen_sampling(args, own)
        # Marks of reasoning may be special tokens, and are looked for in the text.
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
        """Let XTC remove none of these tokens."""
        self.sampling = replace(self.sampling, xtc_special_tokens=token_ids)

    def next_params(self) -> SamplingParams:
        """The parameters of the next answer, whose draws are its own."""
        return replace(self.sampling, seed=self._seeds.getrandbits(63))

    def describe_sampling(self) -> str:
        """``"greedy"``, or the temperature and the filters that are on, in a few words."""
        sampling = self.sampling
        if sampling.is_greedy:
            return "greedy"
        shown = [f"temp {sampling.temperature:g}"]
        for name, variable in _SAMPLING_VARIABLES.items():
            value = getattr(sampling, variable)
            if variable not in _SHOWN_APART and value != getattr(_DEFAULTS, variable):
                shown.append(f"{name} {_in_words(value)}")
        if sampling.xtc_probability:
            shown.append(f"xtc {sampling.xtc_probability:g} above {sampling.xtc_threshold:g}")
        return ", ".join(shown)

    def get(self, name: str) -> str:
        return _variable(name).get(self)

    def set(self, name: str, text: str) -> None:
        """Change one setting.

        Raises:
            ValueError: the name is unknown, or the setting can't have the value.
        """
        try:
            _variable(name).set(self, text)
        except argparse.ArgumentTypeError as error:
            raise ValueError(f"{name} {error}") from error
        if name in self.from_model:
            self.from_model.remove(name)


class Variable(NamedTuple):
    """A setting as ``/set`` knows it: its value as text, how to change it, what it accepts."""

    get: Callable[[Settings], str]
    set: Callable[[Settings, str], None]
    values: tuple[str, ...] = ()


def _variable(name: str) -> Variable:
    if name not in VARIABLES:
        raise ValueError(f"no setting is called {name!r}; there are {', '.join(VARIABLES)}")
    return VARIABLES[name]


def canonical_name(name: str) -> str:
    """``top_p``, ``TOP-P`` and ``--top-p`` are ``top-p``; ``temperature`` is ``temp``."""
    name = name.lower().lstrip("-").replace("_", "-")
    return "temp" if name == "temperature" else name


def _sampling_variable(field: str, parse: Callable[[str], Any]) -> Variable:
    def change(settings: Settings, text: str) -> None:
        value = parse(text)
        settings.sampling = replace(settings.sampling, **{field: value})

    return Variable(lambda settings: _in_words(getattr(settings.sampling, field)), change)


def _in_words(value: object) -> str:
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def _set_thinking(settings: Settings, text: str) -> None:
    if text.lower() not in ("show", "hide"):
        raise argparse.ArgumentTypeError(f"must be show or hide, got {text!r}")
    settings.show_thinking = text.lower() == "show"


# Sampling parameters that have a flag, by the name that /set has for them.
_SAMPLING_VARIABLES = {
    each.flag_name(name).removeprefix("--"): name
    for name, each in SAMPLING_PARAMS.items()
    if each.flag is not None
}
_SHOWN_APART = ("temperature", "xtc_probability", "xtc_threshold", "max_tokens")
_DEFAULTS = SamplingParams()
VARIABLES = {
    **{
        name: _sampling_variable(field, SAMPLING_PARAMS[field].flag_domain.read_flag)
        for name, field in _SAMPLING_VARIABLES.items()
    },
    "seed": Variable(
        lambda settings: str(settings.seed),
        lambda settings, text: settings.set_seed(AT_LEAST_0.read_flag(text)),
    ),
    "thinking": Variable(
        lambda settings: "show" if settings.show_thinking else "hide",
        _set_thinking,
        ("show", "hide"),
    ),
}
