"""How answers are sampled and shown: the model's defaults, the flags, and what /set changes."""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mlx_paged.command_line.flags import chosen_sampling
from mlx_paged.domains import AT_LEAST_0, Domain, one_of
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
        for name, variable in _FIELDS.items():
            value = getattr(sampling, variable)
            if variable not in _SHOWN_APART and value != getattr(_DEFAULTS, variable):
                shown.append(f"{name} {_in_words(value)}")
        if sampling.xtc_probability:
            shown.append(f"xtc {sampling.xtc_probability:g} above {sampling.xtc_threshold:g}")
        return ", ".join(shown)

    def get(self, name: str) -> str:
        """A setting as text; raises ``ValueError`` where none has this name."""
        _check_name(name)
        if name == "thinking":
            return "show" if self.show_thinking else "hide"
        return _in_words(self.seed if name == "seed" else getattr(self.sampling, _FIELDS[name]))

    def set(self, name: str, text: str) -> None:
        """Change one setting.

        Raises:
            ValueError: the name is unknown, or the setting can't have the value.
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
        raise ValueError(f"no setting is called {name!r}; there are {', '.join(VARIABLES)}")


def _in_words(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


# Sampling parameters that have a flag, by the name that /set has for them.
_FIELDS = {
    each.flag_name(name).removeprefix("--"): name
    for name, each in SAMPLING_PARAMS.items()
    if each.flag is not None
}
_SHOWN_APART = ("temperature", "xtc_probability", "xtc_threshold", "max_tokens")
_DEFAULTS = SamplingParams()
# What can be changed while the chat runs, and to which values.
VARIABLES: dict[str, Domain[Any]] = {
    **{name: SAMPLING_PARAMS[field].flag_domain for name, field in _FIELDS.items()},
    "seed": AT_LEAST_0,
    "thinking": replace(one_of("show", "hide"), what="show or hide", parse=str.lower),
}
