"""What an argument of the library is, said once, at its annotation. Imports no MLX.

``SamplingParams`` and the options of an engine are annotated with ``Annotated[type, Param(...)]``
and ``Annotated[type, Option(...)]``. Checks, flags, refusals of other projects' names and the
tables of `docs/options.md` are made from these; a type checker sees the type.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

A = TypeVar("A", bound="Argument")

Program = Literal["chat", "server"]


@dataclass(frozen=True)
class Check:
    """Whether a value can be had, and what it must be, in words that follow "must be"."""

    is_right: Callable[[object], bool]
    what: str


@dataclass(frozen=True)
class Flag:
    """How programs take an argument.

    Args:
        read: the value of a text; it raises ``argparse.ArgumentTypeError``. ``None`` is a switch.
        name: with dashes; by default made of the argument's name.
        also: other spellings of the flag.
        metavar: what the help calls its value; by default as argparse does.
        choices: the only values; ``None`` is any that ``read`` takes.
        default: where it is not given.
        help: of the flag; by default that of the argument.
        says: what the help says of the default; empty: ``default``, or that of the library.
        programs: those that have the flag.
    """

    read: Callable[[str], Any] | None
    name: str = ""
    also: tuple[str, ...] = ()
    metavar: str | None = None
    choices: tuple[Any, ...] | None = None
    default: Any = None
    help: str = ""
    says: str = ""
    programs: tuple[Program, ...] = ("chat", "server")


@dataclass(frozen=True)
class Argument:
    """An argument of the library.

    Args:
        help: what it does, with its unit and range.
        flag: of the programs; ``None``: they have none.
        elsewhere: what other projects call it, separated by blanks.
        notation: how its value is written, after its name, in a refusal of such a name.
    """

    help: str
    flag: Flag | None = None
    elsewhere: str = ""
    notation: str = ""

    def flag_name(self, name: str) -> str:
        """The flag of the argument ``name``, with dashes."""
        return (self.flag and self.flag.name) or f"--{name.replace('_', '-')}"


@dataclass(frozen=True)
class Param(Argument):
    """A sampling parameter.

    Args:
        check: of the value.
        each: of each of its elements.
        per_row: whether, under such a parameter, the draw of a token depends on nothing but its
            logits and its position, so that tokens behind drafts may be drawn together.
        wire: how the server reads the field of this name; ``None``: in a way of its own.
    """

    check: Check | None = None
    each: Check | None = None
    per_row: bool = False
    wire: Literal["number", "integer", "boolean", "tokens"] | None = None


def declared(kind: type[A], annotations: Mapping[str, Any]) -> dict[str, A]:
    """The declarations among the annotations of a class, by name, in their order."""
    found = {}
    for name, annotation in annotations.items():
        for each in getattr(annotation, "__metadata__", ()):
            if isinstance(each, kind):
                found[name] = each
    return found


def with_help(doc: str | None, arguments: Mapping[str, Argument]) -> str:
    """A docstring whose line ``Args:`` is followed by what is declared of each argument."""
    before, line, after = (doc or "").partition("    Args:\n")
    return before + line + "\n".join(_help_lines(arguments)) + "\n" + after


def _help_lines(arguments: Mapping[str, Argument]) -> Iterable[str]:
    for name, argument in arguments.items():
        yield textwrap.fill(
            f"{name}: {argument.help}",
            100,
            initial_indent=" " * 8,
            subsequent_indent=" " * 12,
            break_long_words=False,
            break_on_hyphens=False,
        )


def names_elsewhere(arguments: Mapping[str, Argument]) -> dict[str, str]:
    """Our names by those of other projects."""
    return {other: name for name, each in arguments.items() for other in each.elsewhere.split()}


def notations(arguments: Mapping[str, Argument]) -> dict[str, str]:
    """How values are written, by argument, where there is something to say."""
    return {name: each.notation for name, each in arguments.items() if each.notation}
