"""How answers are sampled and shown: the model's defaults, the flags, and what /set changes.
Imports no MLX.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from mlx_paged import arguments
from mlx_paged.request import SamplingParams

if TYPE_CHECKING:
    from mlx_paged.generation_config import SamplingDefaults


class Settings:
    """What can be changed while the chat runs.

    Args:
        args: the flags; a sampling flag that was not given is ``None``.
        defaults: the model's own, which flags win over.

    Attributes:
        sampling: how the next answer is sampled, but for its seed.
        show_thinking: whether reasoning is shown.
        from_model: names of the sampling settings that are the model's recommendation.
    """

    def __init__(self, args: argparse.Namespace, defaults: SamplingDefaults):
        temp = _first(args.temp, defaults.temperature, 0.0)
        top_p = _first(args.top_p, defaults.top_p, 1.0)
        self.sampling = SamplingParams(
            max_tokens=args.max_tokens,
            temperature=temp,
            top_p=top_p or 1.0,  # As in mlx-lm, 0 is off.
            top_k=_first(args.top_k, defaults.top_k, 0),
            min_p=_first(args.min_p, defaults.min_p, 0.0),
        )
        self.show_thinking = not args.hide_thinking
        pairs = {
            "temp": (args.temp, defaults.temperature),
            "top-p": (args.top_p, defaults.top_p),
            "top-k": (args.top_k, defaults.top_k),
            "min-p": (args.min_p, defaults.min_p),
        }
        self.from_model = [
            name for name, (flag, own) in pairs.items() if flag is None and own is not None
        ]
        self.set_seed(args.seed)

    def set_seed(self, seed: int) -> None:
        self.seed = seed
        self._seeds = random.Random(seed)

    def next_params(self) -> SamplingParams:
        """The parameters of the next answer, whose draws are its own."""
        return replace(self.sampling, seed=self._seeds.getrandbits(63))

    def describe_sampling(self) -> str:
        """``"greedy"``, or the temperature and the filters that are on, in a few words."""
        sampling = self.sampling
        if sampling.is_greedy:
            return "greedy"
        shown = [f"temp {sampling.temperature:g}"]
        shown += [f"top-p {sampling.top_p:g}"] * (sampling.top_p < 1)
        shown += [f"top-k {sampling.top_k}"] * (sampling.top_k > 0)
        shown += [f"min-p {sampling.min_p:g}"] * (sampling.min_p > 0)
        return ", ".join(shown)

    def get(self, name: str) -> str:
        return VARIABLES[name].get(self)

    def set(self, name: str, text: str) -> None:
        """Change one setting.

        Raises:
            ValueError: the name is unknown or the value is none of its; the message is one line.
        """
        if name not in VARIABLES:
            raise ValueError(f"no setting is called {name!r}; there are {', '.join(VARIABLES)}")
        try:
            VARIABLES[name].set(self, text)
        except argparse.ArgumentTypeError as error:
            raise ValueError(f"{name} {error}") from error
        if name in self.from_model:
            self.from_model.remove(name)


class Variable(NamedTuple):
    """A setting as ``/set`` knows it: its value as text, how to change it, what it accepts."""

    get: Callable[[Settings], str]
    set: Callable[[Settings, str], None]
    values: tuple[str, ...] = ()


def canonical_name(name: str) -> str:
    """``top_p``, ``TOP-P`` and ``--top-p`` are ``top-p``; ``temperature`` is ``temp``."""
    name = name.lower().lstrip("-").replace("_", "-")
    return "temp" if name == "temperature" else name


def _sampling_variable(field: str, parse: Callable[[str], Any]) -> Variable:
    def change(settings: Settings, text: str) -> None:
        value = parse(text)
        settings.sampling = replace(settings.sampling, **{field: value})

    return Variable(lambda settings: f"{getattr(settings.sampling, field):g}", change)


def _top_p(text: str) -> float:
    return arguments.probability(text) or 1.0


def _set_thinking(settings: Settings, text: str) -> None:
    if text.lower() not in ("show", "hide"):
        raise argparse.ArgumentTypeError(f"must be show or hide, got {text!r}")
    settings.show_thinking = text.lower() == "show"


VARIABLES = {
    "temp": _sampling_variable("temperature", arguments.at_least_0),
    "top-p": _sampling_variable("top_p", _top_p),
    "top-k": _sampling_variable("top_k", arguments.whole),
    "min-p": _sampling_variable("min_p", arguments.probability),
    "max-tokens": _sampling_variable("max_tokens", arguments.max_tokens),
    "seed": Variable(
        lambda settings: str(settings.seed),
        lambda settings, text: settings.set_seed(arguments.whole(text)),
    ),
    "thinking": Variable(
        lambda settings: "show" if settings.show_thinking else "hide",
        _set_thinking,
        ("show", "hide"),
    ),
}


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)
