"""What an argument of the library is, said once, where its type is. Imports no MLX.

A field of ``SamplingParams`` has a :class:`Param`, and an option of an engine is annotated with
``Annotated[type, Option(...)]``. Checks, flags, refusals of other projects' names and the tables of
the documentation are made from these; a type checker sees the type.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mlx_paged.domains import Domain

Program = Literal["chat", "server"]


@dataclass(frozen=True)
class Flag:
    """How programs take an argument.

    Args:
        programs: those that have the flag.
        name: with dashes; by default made of the argument's name.
        also: other spellings of the flag.
        domain: of the flag's values; by default that of the argument.
        default: where the flag is not given and that is not the library's own default.
        help: of the flag; by default that of the argument.
        says: what the help says of the default, where the value does not say it.
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
        flag: of the programs; ``None``: they have none.
        elsewhere: what other projects call it, separated by blanks.
        notation: how its value is written, after its name, in a refusal of such a name.
    """

    help: str
    domain: Domain[Any]
    flag: Flag | None = None
    elsewhere: str = ""
    notation: str = ""

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
        per_row: whether, under such a parameter, the draw of a token depends on nothing but its
            logits and its position, so that tokens after drafts may be drawn together.
        wire: whether the server reads a field of this name, and takes what the domain has.
    """

    per_row: bool = False
    wire: bool = True


@dataclass(frozen=True)
class Option(Argument):
    """An option of an engine.

    Args:
        flag: both programs have one, unless it says otherwise.
        default: what an engine takes where it is not given.
        says: of the default, where the value does not say it.
    """

    flag: Flag | None = Flag()
    default: Any = None
    says: str = ""


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
