"""Checks of the arguments of :class:`LLM`, some of which have one value or one for each prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlx_paged.argument_values import is_sequence, kind_of
from mlx_paged.domains import BOOL, Domain, or_none, such, whole
from mlx_paged.errors import ArgumentError, shown
from mlx_paged.sampling_params import SamplingParams

Message = Mapping[str, Any]

# The domain of each value, and a description of the whole argument.
_EACH: dict[str, tuple[Domain[Any], str]] = {
    "sampling_params": (
        or_none(
            such("SamplingParams", lambda value: isinstance(value, SamplingParams)),
            "SamplingParams",
        ),
        "SamplingParams, one for all or a list with one for each prompt",
    ),
    "priority": (whole(), "a list with a whole number for each prompt"),
    "no_store": (BOOL, "True or False, for all or a list with one for each prompt"),
}
# These are arguments of the functions that render a template, and not variables of it.
_NO_VARIABLES = {
    "tokenizer", "messages", "conversation", "tokenize", "return_dict", "return_tensors",
    "chat_template",
}  # fmt: skip


def one_for_each(name: str, given: object, num_prompts: int) -> list[Any]:
    """A value for each prompt: ``given`` is a list of them, or one (or ``None``) for all.

    Raises:
        ValueError: the list has another length, or a value is invalid.
    """
    domain, what = _EACH[name]
    if given is None or isinstance(given, SamplingParams | bool):
        default = 0 if name == "priority" and given is None else given
        return [_checked(domain, name, default)] * num_prompts
    tolist = getattr(given, "tolist", None)
    values = tolist() if callable(tolist) else given
    if not is_sequence(values):
        raise ValueError(f"[generate] {name} must be {what}, got {shown(given)} ({kind_of(given)})")
    if len(values) != num_prompts:
        raise ValueError(
            f"[generate] {len(values)} {name} for {num_prompts} prompts; give one for each"
        )
    return [_checked(domain, f"{name}[{index}]", value) for index, value in enumerate(values)]


def _checked(domain: Domain[Any], name: str, value: object) -> Any:
    try:
        return domain.check("generate", name, value)
    except ArgumentError as error:
        is_params = name.startswith("sampling_params") and isinstance(value, Mapping)
        way_out = "; write SamplingParams(**...)" if is_params else ""
        raise ValueError(f"{error} ({kind_of(value)}){way_out}") from None


def split_conversations(messages: object) -> list[Any]:
    """The conversations of a call: a list that begins with a message is one, a list of lists is
    several.
    """
    if isinstance(messages, Mapping):
        raise ValueError(
            "[chat] messages must be a list of messages, got one message; write [message]"
        )
    if not is_sequence(messages):
        raise ValueError(
            "[chat] messages must be a list of messages or a list of such lists, got "
            f"{kind_of(messages)}; use generate for plain text"
        )
    if not messages or is_sequence(messages[0]):
        return list(messages)
    if not isinstance(messages[0], Mapping):
        raise ValueError(
            "[chat] messages[0] must be a message such as {'role': 'user', 'content': 'Hello'}, "
            f"or a list of them, got {kind_of(messages[0])}"
        )
    return [messages]


def checked_template_options(options: object) -> Mapping[str, Any]:
    if options is None:
        return {}
    if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
        raise ValueError(
            "[chat] chat_template_kwargs must be a dict of the template's variables, got "
            f"{shown(options)}"
        )
    for name in sorted(_NO_VARIABLES.intersection(options)):
        raise ValueError(
            f"[chat] chat_template_kwargs[{name!r}] is not a template variable; leave it out"
        )
    return options
