"""``Fields``: a JSON object that is read field by field; what is not read is refused by name, or
left out where clients only repeat it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, overload

from mlx_paged.argument_values import is_plain_integer, kind_of
from mlx_paged.domains import is_number
from mlx_paged.errors import shown
from mlx_paged.server.errors import ApiError

T = TypeVar("T")
# Messages of a conversation, parts of one, tools. To read one takes some ten microseconds.
MAX_CHILDREN = 2**13
REQUIRED: Any = object()
"""The default of a field that has to be there."""

LOG = logging.getLogger("mlx_paged.server")
_MAX_LOGGED = 256  # names of fields that were left out
_logged: set[str] = set()


class Fields:
    """A JSON object of a request, and which of its fields were read.

        fields = Fields(body)
        prompt = fields.text("prompt")
        top_k = fields.integer("top_k", default=0)
        fields.refuse_rest()

    A field that is ``null`` is as if it were not there. Every method that reads one raises an
    :class:`ApiError` with status 400 that names the field where its value has another type.

    Args:
        value: the object.
        path: where it stands in the body, such as ``"messages[2]"``; ``""`` for the body itself.
    """

    def __init__(self, value: object, path: str = ""):
        if not isinstance(value, Mapping):
            what = path or "the body"
            raise ApiError(
                400, f"{what} must be an object, got {kind_of(value)}", param=path or None
            )
        self._values = value
        self._unread = {name for name, each in value.items() if each is not None}
        self._left_out: set[str] = set()
        self.path = path

    def name_of(self, name: str) -> str:
        """The field's name from the body on."""
        return f"{self.path}.{name}" if self.path else name

    def error(self, name: str, what: str) -> ApiError:
        """``name`` must be something else."""
        full = self.name_of(name)
        return ApiError(400, f"{full} {what}", param=full)

    def has(self, name: str) -> bool:
        """Whether the field is there and not ``null``. Does not read it."""
        return self._values.get(name) is not None

    def raw(self, name: str) -> Any:
        """The value as it is; ``None`` where there is none."""
        self._unread.discard(name)
        return self._values.get(name)

    @overload
    def text(self, name: str) -> str: ...
    @overload
    def text(self, name: str, default: T) -> str | T: ...
    def text(self, name: str, default: Any = REQUIRED) -> Any:
        return self._read(name, default, lambda value: isinstance(value, str), "a text")

    def filled_text(self, name: str) -> str:
        """A text that is not empty."""
        text = self.text(name)
        if not text:
            raise self.error(name, "is empty")
        return text

    @overload
    def boolean(self, name: str) -> bool: ...
    @overload
    def boolean(self, name: str, default: T) -> bool | T: ...
    def boolean(self, name: str, default: Any = REQUIRED) -> Any:
        return self._read(name, default, lambda value: isinstance(value, bool), "true or false")

    @overload
    def integer(self, name: str) -> int: ...
    @overload
    def integer(self, name: str, default: T) -> int | T: ...
    def integer(self, name: str, default: Any = REQUIRED) -> Any:
        return self._read(name, default, is_plain_integer, "a whole number")

    @overload
    def number(self, name: str) -> float: ...
    @overload
    def number(self, name: str, default: T) -> float | T: ...
    def number(self, name: str, default: Any = REQUIRED) -> Any:
        return self._read(name, default, is_number, "a number")

    @overload
    def items(self, name: str) -> list[Any]: ...
    @overload
    def items(self, name: str, default: T) -> list[Any] | T: ...
    def items(self, name: str, default: Any = REQUIRED) -> Any:
        return self._read(name, default, lambda value: isinstance(value, list), "a list")

    def texts(self, name: str, max_items: int, max_len: int) -> tuple[str, ...]:
        """Texts that are not empty, in a list, or one that stands alone; none by default.

        Args:
            max_len: characters of all of them.
        """
        is_right: Callable[[object], bool] = lambda value: isinstance(value, str) and value != ""  # noqa: E731
        if isinstance(self._values.get(name), str):
            texts: tuple[str, ...] = (self.text(name),)
        else:
            texts = self._elements(name, max_items, is_right, "texts that are not empty")
        if (length := sum(map(len, texts))) > max_len:
            raise self.error(name, f"has {length:,} characters, and {max_len:,} are the most")
        return texts

    def integers(self, name: str, max_items: int) -> tuple[int, ...]:
        """Whole numbers in a list; none by default."""
        return self._elements(name, max_items, is_plain_integer, "whole numbers")

    def choice(self, name: str, choices: Sequence[T], default: T = REQUIRED) -> T:
        """One of some values."""
        what = " or ".join(map(shown, choices))
        is_right: Callable[[object], bool] = lambda value: any(  # noqa: E731
            type(value) is type(each) and value == each for each in choices
        )
        value: T = self._read(name, default, is_right, what)
        return value

    @overload
    def child(self, name: str) -> Fields: ...
    @overload
    def child(self, name: str, default: T) -> Fields | T: ...
    def child(self, name: str, default: Any = REQUIRED) -> Any:
        if not self.has(name):
            return self._default(name, default)
        return Fields(self.raw(name), self.name_of(name))

    def children(self, name: str, default: Sequence[Fields] | None = None) -> Iterator[Fields]:
        """The objects of a list, each with its place; at most ``MAX_CHILDREN``."""
        if not self.has(name) and default is not None:
            yield from default
            return
        values = self.items(name)
        self._check_length(name, len(values), MAX_CHILDREN)
        for index, value in enumerate(values):
            yield Fields(value, f"{self.name_of(name)}[{index}]")

    def accept(self, *names: str) -> None:
        """Read fields that change nothing here, whatever they say."""
        self._unread.difference_update(names)

    def only(self, name: str, *values: object) -> None:
        """Refuse a field by name, unless it says what happens in any case."""
        value = self.raw(name)
        if value is None or any(type(value) is type(each) and value == each for each in values):
            return
        raise self.error(name, f"is not supported, got {shown(value)}; leave it out")

    def known(self) -> dict[str, Any]:
        """What was read, or is ``null``, in the order of the body."""
        return {name: value for name, value in self._values.items() if name not in self._left_out}

    def unread(self) -> frozenset[str]:
        """The fields that nobody read."""
        return frozenset(self._unread)

    def refuse_rest(self, advice: Mapping[str, str] | None = None) -> None:
        """Raise for the first field, by name, that nobody read.

        Args:
            advice: what to do instead, by the field's name.
        """
        for name in sorted(self._unread, key=str):
            way_out = (advice or {}).get(name, "leave it out")
            raise self.error(str(name), f"is not supported; {way_out}")

    def leave_out_rest(self, advice: Mapping[str, str] | None = None) -> None:
        """Pass over the fields that were not read: of messages, their parts and tools, in which
        clients repeat what some server said and give hints to others. Each is logged once.

        Args:
            advice: fields that are refused all the same, and what to do instead.
        """
        if not self._unread:
            return
        refused = Fields({name: True for name in self._unread if name in (advice or {})}, self.path)
        refused.refuse_rest(advice)
        log_left_out(map(self.name_of, sorted(self._unread, key=str)))
        self._left_out, self._unread = self._unread, set()

    def _elements(
        self, name: str, max_items: int, is_right: Callable[[Any], bool], what: str
    ) -> tuple[Any, ...]:
        values = self.items(name, ())
        self._check_length(name, len(values), max_items)
        for index, value in enumerate(values):
            if not is_right(value):
                raise self.error(f"{name}[{index}]", f"must be one of {what}, got {shown(value)}")
        return tuple(values)

    def _check_length(self, name: str, length: int, most: int) -> None:
        if length > most:
            raise self.error(name, f"has {length:,} entries, and {most:,} are the most")

    def _read(self, name: str, default: Any, is_right: Callable[[Any], bool], what: str) -> Any:
        if not self.has(name):
            return self._default(name, default)
        value = self.raw(name)
        if not is_right(value):
            raise self.error(name, f"must be {what}, got {shown(value)}")
        return value

    def _default(self, name: str, default: Any) -> Any:
        if default is REQUIRED:
            raise self.error(name, "is missing")
        return default


def log_left_out(names: Iterable[str]) -> None:
    """Log fields that were left out, by their places in the body: each once, and those only whose
    names are short words, since clients can make up any.
    """
    for name in names:
        place = re.sub(r"\[\d+\]", "[]", name)
        is_word = place.replace("[]", "").replace(".", "_").isidentifier() and len(place) <= 80
        if is_word and place not in _logged and len(_logged) < _MAX_LOGGED:
            _logged.add(place)
            LOG.info("left out, since it has no effect here: %s", place)
