"""Arguments: checks of types, the domains of valid values, declarations of the library's arguments,
and token ids of any form. Does not import MLX.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import math
import numbers
import operator
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    Literal,
    Protocol,
    TypeAlias,
    TypeGuard,
    TypeVar,
)

from mlx_paged.errors import ArgumentError, reason, shown

if TYPE_CHECKING:
    import mlx.core as mx
    import numpy as np

T = TypeVar("T")


def kind_of(value: object) -> str:
    """The name of a value's type."""
    return type(value).__name__


def is_sequence(value: object) -> TypeGuard[Sequence[Any]]:
    """Whether ``value`` is a sequence other than text and bytes."""
    return isinstance(value, Sequence) and not isinstance(
        value, (str, bytes, bytearray, memoryview)
    )


def is_plain_integer(value: object, low: int | None = None) -> TypeGuard[int]:
    """Whether ``value`` is a Python ``int`` of at least ``low``, as in JSON, and not a ``bool``."""
    if not isinstance(value, int) or isinstance(value, bool):
        return False
    return low is None or value >= low


def as_integer(value: object) -> int | None:
    """An integer of any type, such as numpy's or MLX's, as Python's ``int``.

    ``None`` for everything else: a bool, a float, a text.
    """
    # Before numpy 2, a bool of numpy could be used as an index.
    if isinstance(value, bool) or "bool" in kind_of(value):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except Exception:
        # __index__ of an unknown type may raise anything.
        return _scalar_of_an_array(value)


def _scalar_of_an_array(value: object) -> int | None:
    # Before 0.32.3, an array of MLX without dimensions could not be used as an index.
    if getattr(value, "ndim", None) != 0 or "int" not in str(getattr(value, "dtype", "")):
        return None
    item = value.item()  # type: ignore[attr-defined]
    return item if type(item) is int else None


@dataclass(frozen=True)
class Domain(Generic[T]):
    """The values that an argument can have.

    Args:
        what: a description, which follows "must be" in errors.
        read: returns a value in the form that is used, such as the bytes of ``"2G"``, or ``None``
            if it is invalid.
        parse: converts a flag's text to a value for ``read``; it may raise ``ValueError``.
        flag_what: ``what`` for a flag, if that differs.
        metavar: the name of the value in a flag's help; by default derived from the flag's name.
        choices: all values, which a flag's help lists.
        may_be_none: whether ``None`` is valid, too.
    """

    what: str
    read: Callable[[object], T | None]
    parse: Callable[[str], object] = str
    flag_what: str = ""
    metavar: str = ""
    choices: tuple[T, ...] | None = None
    may_be_none: bool = False

    def check(self, part: str, name: str, value: object) -> T:
        """The value of the argument ``name`` in the form that is used.

        Args:
            part: of the package, in brackets at the beginning of errors.

        Raises:
            ArgumentError: the value is invalid.
        """
        found = self.read(value)
        if found is None and not (value is None and self.may_be_none):
            raise refused(part, name, self.what, value)
        return found  # type: ignore[return-value]

    def read_flag(self, text: str) -> Any:
        """The value of a flag. Raises ``argparse.ArgumentTypeError``."""
        with contextlib.suppress(ValueError):
            value = self.parse(text)
            if self.read(value) is not None:
                return value
        raise argparse.ArgumentTypeError(
            f"must be {self.flag_what or self.what}, got {shown(text)}"
        )


@dataclass(frozen=True)
class Several(Domain[Any]):
    """Sequences of values, as tuples. A text is a single value. ``None`` is the empty tuple, or
    stays ``None`` if ``may_be_none``.

    Args:
        what, read: of the elements.
        min_length: of a sequence.
    """

    min_length: int = 0

    def check(self, part: str, name: str, value: object) -> Any:
        if value is None:
            return None if self.may_be_none else ()
        try:
            values = (value,) if isinstance(value, str) else tuple(value)  # type: ignore[arg-type]
        except Exception:
            # __iter__ of an unknown type may raise anything.
            raise refused(part, name, "a sequence", value) from None
        if len(values) < self.min_length:
            raise refused(part, name, self.what, value)
        found = tuple(map(self.read, values))
        for each, read in zip(values, found, strict=True):
            if read is None:
                raise refused(part, name, self.what, each)
        return found


def refused(part: str, name: str, what: str, value: object) -> ArgumentError:
    """The error for an invalid value of an argument."""
    return ArgumentError(f"[{part}] {name} must be {what}, got {shown(value)}", name)


def or_none(domain: Domain[Any], what: str = "") -> Domain[Any]:
    """The values of a domain, and ``None``."""
    return replace(domain, what=what or f"{domain.what}, or None", may_be_none=True)


def matching(what: str, is_valid: Callable[[Any], bool], **more: Any) -> Domain[Any]:
    """The values for which ``is_valid`` holds, unchanged."""
    return Domain(what, lambda value: value if is_valid(value) else None, **more)


def whole(
    low: float = -math.inf, high: float = math.inf, what: str = "", flag_what: str = ""
) -> Domain[int]:
    """Integers of any type within ``low..high``."""

    def read(value: object) -> int | None:
        number = value if type(value) is int else as_integer(value)
        return number if number is not None and low <= number <= high else None

    if not what:
        is_open = math.isinf(high)
        bounds = (f", at least {low}" if is_open else f" within {low}..{high}") * (low > -math.inf)
        what = f"a whole number{bounds}"
    return Domain(what, read, int, flag_what, "N")


def number(
    low: float, high: float, what: str, flag_what: str = "", *, is_open: bool = False
) -> Domain[float]:
    """Finite numbers within ``low..high``, without ``low`` if ``is_open``."""

    def is_valid(value: Any) -> bool:
        return is_number(value) and low <= value <= high and not (is_open and value == low)

    return matching(what, is_valid, parse=float, flag_what=flag_what)


def one_of(*values: T) -> Domain[T]:
    """One of these values."""
    what = f"one of {', '.join(map(str, values))}"
    return matching(what, values.__contains__, parse=type(values[0]), choices=values)


def is_number(value: object) -> bool:
    """Whether a value is a finite number of any type but bool."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


BOOL = matching("True or False", lambda value: isinstance(value, bool), parse=bool)
ANY_TEXT = matching("a text", lambda value: isinstance(value, str))
TEXT = matching("a text that is not empty", lambda value: isinstance(value, str) and value != "")
TOKEN = whole(0, what="token ids")
# Of a size or a count in Python or JSON, where numbers of other types are mistakes.
POSITIVE = matching("a positive integer", lambda value: is_plain_integer(value, 1))
SHARE = number(0, 1, "a number within 0..1", "within 0..1")
AT_LEAST_0 = whole(0, 2**63, "a whole number, at least 0")
AT_LEAST_1 = whole(1, 2**63, "a positive integer", "a whole number, at least 1")


# Declarations. A field of ``SamplingParams`` is annotated with ``Annotated[type, Param(...)]``, an
# option of an engine and a setting of the server with an ``Option``. Checks, flags and the tables
# of the documentation are derived from these; a type checker sees the type.

Program = Literal["chat", "server"]


@dataclass(frozen=True)
class Flag:
    """The flag of an argument.

    Args:
        programs: the programs that have the flag.
        name: with dashes; by default derived from the argument's name.
        also: other names of the flag.
        domain: of the flag's values; by default that of the argument.
        default: of the flag, if it differs from the library's.
        help: of the flag; by default that of the argument.
        default_text: what the help says about the default, instead of its value.
    """

    programs: tuple[Program, ...] = ("chat", "server")
    name: str = ""
    also: tuple[str, ...] = ()
    domain: Domain[Any] | None = None
    default: Any = None
    help: str = ""
    default_text: str = ""


@dataclass(frozen=True)
class Argument:
    """An argument of the library.

    Args:
        help: what it does, with its unit and range.
        domain: its values.
        flag: of the programs; ``None``: no flag.
    """

    help: str
    domain: Domain[Any]
    flag: Flag | None = None

    def flag_name(self, name: str) -> str:
        """The flag of the argument ``name``, with dashes."""
        return (self.flag and self.flag.name) or f"--{name.replace('_', '-')}"

    @property
    def flag_domain(self) -> Domain[Any]:
        """The values that the flag has."""
        return (self.flag and self.flag.domain) or self.domain


@dataclass(frozen=True)
class Param(Argument):
    """A sampling parameter.

    Args:
        per_row: whether, with this parameter, the draw of a token depends only on its logits and
            its position, so that tokens after drafts may be drawn together.
        wire: whether the server accepts a field of this name, with the values of the domain.
    """

    per_row: bool = False
    wire: bool = True


@dataclass(frozen=True)
class Option(Argument):
    """An option of an engine.

    Args:
        flag: by default, both programs have one.
        default: of an engine.
        default_text: what the help says about the default, instead of its value.
    """

    flag: Flag | None = Flag()
    default: Any = None
    default_text: str = ""


def switch(help: str) -> Option:
    """An option that a flag without a value turns on."""
    return Option(help, BOOL, default=False)


def declared(cls: type) -> dict[str, Any]:
    """The declarations of a class's fields by name, each of which is written ``name:
    Annotated[type, Param(...)]``.
    """
    annotations = inspect.get_annotations(cls, eval_str=True)
    return {
        name: annotation.__metadata__[0]
        for name, annotation in annotations.items()
        if hasattr(annotation, "__metadata__")
    }


def with_help(doc: str | None, arguments: Mapping[str, Argument]) -> str:
    """A docstring with the help of each argument inserted after its line ``Args:``."""
    before, line, after = (doc or "").partition("    Args:\n")
    wrapper = textwrap.TextWrapper(
        100,
        initial_indent=" " * 8,
        subsequent_indent=" " * 12,
        break_long_words=False,
        break_on_hyphens=False,
    )
    lines = [wrapper.fill(f"{name}: {each.help}") for name, each in arguments.items()]
    return before + line + "\n".join(lines) + "\n" + after


# Token ids

TokenIds: TypeAlias = "Sequence[int] | mx.array | np.ndarray"


class Array(Protocol):
    """An array of numpy, MLX or another library."""

    shape: Any
    ndim: int

    def tolist(self) -> Any: ...


def check_token_ids(token_ids: object, vocab_size: int, name: str = "prompt") -> list[int]:
    """The token ids as Python integers, checked because a model looks up any number silently.

    Raises:
        ValueError: not a sequence or an array of one dimension, or an element is not an integer or
            is outside the vocabulary; the message gives its position.
    """
    checked: list[int] = []
    for token in _elements(token_ids, name):
        index = token if type(token) is int else as_integer(token)
        if index is None:
            raise ArgumentError(
                f"[prompt] token ids are integers, got {shown(token)} ({kind_of(token)}) as "
                f"{name}[{len(checked)}]"
            )
        if not 0 <= index < vocab_size:
            raise ArgumentError(
                f"[prompt] token id {index} is outside the model's vocabulary of {vocab_size}, "
                f"given as {name}[{len(checked)}]"
            )
        checked.append(index)
    return checked


def _elements(token_ids: object, name: str) -> Sequence[object]:
    if is_array(token_ids):
        if token_ids.ndim != 1:
            raise ArgumentError(
                f"[prompt] {name} is an array of shape {tuple(token_ids.shape)}; token ids "
                f"have one dimension, such as {name}[0]"
            )
        return read_array(token_ids, name)
    if not is_sequence(token_ids):
        raise ArgumentError(
            f"[prompt] a prompt is text or token ids, got {kind_of(token_ids)} as {name}"
        )
    return token_ids


def is_array(value: object) -> TypeGuard[Array]:
    """Whether a value is an array, judged by its attributes, which works for any library."""
    return (
        hasattr(value, "tolist")
        and hasattr(value, "ndim")
        and not isinstance(value, (type, memoryview))
    )


def read_array(array: Array, name: str) -> list[object]:
    """The elements of an array; raises ``ValueError`` if it can't be read."""
    try:
        elements: list[object] = array.tolist()
    except Exception as error:
        # A lazy array of MLX may fail, or belong to another thread.
        raise ArgumentError(
            f"[prompt] {name} is an array that can't be read: {reason(error)}"
        ) from error
    return elements
