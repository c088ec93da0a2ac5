"""Declarations of the library's arguments, next to their types. Does not import MLX.

A field of ``SamplingParams`` has a :class:`Param`, and an option of an engine is annotated with
``Annotated[type, Option(...)]``. Checks, flags and the tables of the documentation are derived from
these; a type checker sees the type.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mlx_paged.argument_values import Domain

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
        says: what the help says about the default, instead of its value.
    """

    programs: tuple[Program, ...] = ("chat", "server")
    name: str = ""
    also: tuple[str, ...] = ()
    domain: Domain[Any] | None = None
    default: Any = None
    help: str = ""
    says: str = ""


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
        says: what the help says about the default, instead of its value.
    """

    flag: Flag | None = Flag()
    default: Any = None
    says: str = ""


def with_help(doc: str | None, arguments: Mapping[str, Argument]) -> str:
    """A docstring with the help of each argument inserted after its line ``Args:``."""
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
