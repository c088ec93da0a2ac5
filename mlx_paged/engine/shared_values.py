"""Values that rank 0 hands to the others, as JSON: no code travels, and no type that is not listed
here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields
from operator import attrgetter
from typing import Any

from mlx_paged.distributed import RanksError
from mlx_paged.engine.prefix_report import PrefixReport
from mlx_paged.errors import ArgumentError, CacheFullError, PromptTooLongError, RequestError, reason
from mlx_paged.request import CompletionOutput, Logprob, RequestOutput
from mlx_paged.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

_DATA = (
    *(SamplingParams, StructuredOutputsParams),
    *(RequestOutput, CompletionOutput, Logprob, PrefixReport),
)
_ARGUMENT_ERRORS = (PromptTooLongError, CacheFullError, ArgumentError)
_ERRORS = (
    *(RequestError, RanksError),
    *(TypeError, ValueError, LookupError, MemoryError, RuntimeError, KeyboardInterrupt),
)


def as_json(value: object) -> Any:
    """A value as JSON has it. What JSON lacks is an object with one member: the name of its type,
    and the arguments that make it.

    Errors keep their text, and the nearest type that is known here. Functions are called on rank 0
    alone; elsewhere they raise.

    Raises:
        TypeError: of another type than those.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [as_json(each) for each in value]
    for kind, arguments_of, _ in _TYPES:
        if isinstance(value, kind):
            return {kind.__name__: [as_json(each) for each in arguments_of(value)]}
    raise TypeError(f"[ranks] {type(value).__name__} can't be shared between ranks")


def from_json(value: Any) -> Any:
    """What :func:`as_json` was given; raises an error if it did not make this value."""
    if isinstance(value, list):
        return [from_json(each) for each in value]
    if not isinstance(value, dict):
        return value
    ((name, arguments),) = value.items()
    (make,) = (make for kind, _, make in _TYPES if kind.__name__ == name)
    return make(*from_json(arguments))


def _stand_in(*_: object) -> Any:
    raise RuntimeError("[ranks] functions of a request are called on rank 0")


# Each type that travels, the arguments that make a value of it, and what makes it of them. A value
# is of the first type that it is an instance of.
_TYPES: list[tuple[Any, Callable[[Any], Iterable[object]], Callable[..., Any]]] = [
    *((kind, attrgetter(*(field.name for field in fields(kind))), kind) for kind in _DATA),
    (tuple, iter, lambda *entries: entries),
    (dict, lambda value: map(list, value.items()), lambda *items: dict(items)),
    (RequestOutputKind, lambda kind: [kind.value], RequestOutputKind),
    *((kind, lambda error: [str(error), error.argument], kind) for kind in _ARGUMENT_ERRORS),
    *((kind, lambda error: [str(error)], kind) for kind in _ERRORS),
    (Exception, lambda error: [reason(error)], RuntimeError),
    (BaseException, lambda error: [reason(error)], KeyboardInterrupt),
    (Callable, lambda _: [], lambda: _stand_in),
]
