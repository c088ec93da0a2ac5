"""The arguments of :class:`LLM`'s calls, which may be one value or one for each prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from mlx_paged.argument_values import as_integer, is_sequence, kind_of
from mlx_paged.errors import shown
from mlx_paged.sampling_params import SamplingParams

T = TypeVar("T")
Message = Mapping[str, Any]

_WANTED = {
    "sampling_params": "SamplingParams, one for all or a list with one for each prompt",
    "priority": "a list with a whole number for each prompt",
    "no_store": "True or False, for all or a list with one for each prompt",
}
# The template does not see these: they are arguments of the functions that render it.
_NO_VARIABLES = {
    "tokenizer", "messages", "conversation", "tokenize", "return_dict", "return_tensors",
    "chat_template",
}  # fmt: skip


def one_for_each(
    name: str, given: object, num_prompts: int, checked: Callable[[str, object], T]
) -> list[T]:
    """A value for each prompt: ``given`` is a list of them, or one (or ``None``) for all.

    Raises:
        ValueError: the list has another length, or ``checked`` refuses an element.
    """
    if given is None or isinstance(given, SamplingParams | bool):
        return [checked(name, given)] * num_prompts
    tolist = getattr(given, "tolist", None)
    values = tolist() if callable(tolist) else given
    if not is_sequence(values):
        raise ValueError(
            f"[generate] {name} must be {_WANTED[name]}, got {shown(given)} ({kind_of(given)})"
        )
    if len(values) != num_prompts:
        raise ValueError(
            f"[generate] {len(values)} {name} for {num_prompts} prompts; give one for each"
        )
    return [checked(f"{name}[{index}]", value) for index, value in enumerate(values)]


def checked_params(name: str, value: object) -> SamplingParams | None:
    if value is None or isinstance(value, SamplingParams):
        return value
    way_out = "; write SamplingParams(**...)" if isinstance(value, Mapping) else ""
    raise ValueError(
        f"[generate] {name} must be SamplingParams, got {shown(value)} ({kind_of(value)}){way_out}"
    )


def checked_priority(name: str, value: object) -> int:
    priority = 0 if value is None and name == "priority" else as_integer(value)
    if priority is None:
        raise ValueError(
            f"[generate] {name} must be a whole number, got {shown(value)} ({kind_of(value)})"
        )
    return priority


def checked_no_store(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(
            f"[generate] {name} must be True or False, got {shown(value)} ({kind_of(value)})"
        )
    return value


def split_conversations(messages: object) -> list[Any]:
    """The conversations of a call that takes one or several.

    A list that begins with a message is one conversation, and a list of lists is several.
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
            f"[chat] chat_template_kwargs[{name!r}] is no variable of a chat template; leave it out"
        )
    return options
