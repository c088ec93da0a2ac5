"""How answers are sampled and shown: the model's defaults, the flags, and what /set changes."""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from mlx_paged.command_line import values
from mlx_paged.command_line.flags import SAMPLING_FLAGS, chosen_sampling
from mlx_paged.sampling_params import SamplingParams

if TYPE_CHECKING:
    from mlx_paged.loading import SamplingDefaults


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
        own = {name: value for name, value in asdict(defaults).items() if value is not None}
        chosen = chosen_sampling(args, own)
        # Marks of reasoning may be special tokens, and are looked for in the text.
        self.sampling = SamplingParams(
            max_tokens=args.max_tokens, skip_special_tokens=False, **chosen
        )
        self.show_thinking = not args.hide_thinking
        self.from_model = [
            canonical_name(name) for name in own if getattr(args, SAMPLING_FLAGS[name]) is None
        ]
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
        shown += [f"top-p {sampling.top_p:g}"] * (sampling.top_p < 1)
        shown += [f"top-k {sampling.top_k}"] * (sampling.top_k > 0)
        shown += [f"min-p {sampling.min_p:g}"] * (sampling.min_p > 0)
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

    return Variable(lambda settings: f"{getattr(settings.sampling, field):g}", change)


def _top_p(text: str) -> float:
    return values.probability(text) or 1.0


def _set_thinking(settings: Settings, text: str) -> None:
    if text.lower() not in ("show", "hide"):
        raise argparse.ArgumentTypeError(f"must be show or hide, got {text!r}")
    settings.show_thinking = text.lower() == "show"


VARIABLES = {
    "temp": _sampling_variable("temperature", values.at_least_0),
    "top-p": _sampling_variable("top_p", _top_p),
    "top-k": _sampling_variable("top_k", values.whole),
    "min-p": _sampling_variable("min_p", values.probability),
    "xtc-probability": _sampling_variable("xtc_probability", values.probability),
    "xtc-threshold": _sampling_variable("xtc_threshold", values.up_to_a_half),
    "max-tokens": _sampling_variable("max_tokens", values.max_tokens),
    "seed": Variable(
        lambda settings: str(settings.seed),
        lambda settings, text: settings.set_seed(values.whole(text)),
    ),
    "thinking": Variable(
        lambda settings: "show" if settings.show_thinking else "hide",
        _set_thinking,
        ("show", "hide"),
    ),
}
