"""``ModelDialect``: how a model writes reasoning and tool calls, as detected by mlx-lm."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

from mlx_paged.reasoning import ReasoningMarks

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

# For each state, the marks that end it, with the states that follow.
Marks: TypeAlias = "tuple[tuple[str, tuple[tuple[str, str], ...]], ...]"
_ARGUMENTS = "[ARGS]"  # Mistral's


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes tool calls.

    Args:
        name: of mlx-lm's parser, such as ``"json_tools"`` or ``"qwen3_coder"``.
        start, end: the marks around one or several calls. An empty ``end`` is the answer's end.
        parse: (text between the marks, tools) to a mapping with ``name`` and ``arguments``, or to
            a list of them. It may raise anything.
        arguments: the mark between the name and the arguments; empty if there is none.
        token_ids: the ids of marks that are special tokens to a grammar. Other marks are text.
        start_token_ids, end_token_ids: the tokens of the marks.
    """

    name: str
    start: str
    end: str
    parse: Callable[[str, list[dict[str, Any]]], Any]
    arguments: str = ""
    token_ids: Mapping[str, int] = field(default_factory=dict)
    start_token_ids: tuple[int, ...] = ()
    end_token_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, tokenizer: TokenizerWrapper) -> ToolFormat | None:
        """The format of the tokenizer's model; ``None`` if it is unknown."""
        if not tokenizer.tool_call_start or tokenizer.tool_parser is None:
            return None
        start, end = str(tokenizer.tool_call_start), tokenizer.tool_call_end or ""
        vocabulary, added = tokenizer.get_vocab(), tokenizer.added_tokens_decoder
        arguments = _ARGUMENTS if _ARGUMENTS in vocabulary else ""
        # Tokens in angle brackets are special to llguidance, whatever the tokenizer says.
        token_ids = {
            mark: vocabulary[mark]
            for mark in (start, end, arguments)
            if (token := added.get(vocabulary.get(mark)))
            and (token.special or (mark[0], mark[-1]) == ("<", ">"))
        }
        return cls(
            str(tokenizer.tool_parser.__module__).rpartition(".")[2],
            start,
            end,
            tokenizer.tool_parser,
            arguments,
            token_ids,
            tuple(tokenizer.tool_call_start_tokens or ()),
            tuple(tokenizer.tool_call_end_tokens or ()),
        )


@dataclass(frozen=True)
class ModelDialect:
    """How a model writes reasoning and tool calls.

    Args:
        reasoning: the marks around reasoning; ``None`` for a model without marks.
        tools: the format of tool calls; ``None`` if it is unknown.
        transitions: of the tokenizer's response format, if it has one.
        initial_state: of that format.
        markers: structural marks of an answer that are hidden from readers.
    """

    reasoning: ReasoningMarks | None = None
    tools: ToolFormat | None = None
    transitions: Marks = ()
    initial_state: str | None = None
    markers: tuple[str, ...] = ()

    @classmethod
    def of(cls, tokenizer: TokenizerWrapper) -> ModelDialect:
        """The dialect of a tokenizer's model."""
        return _dialect_of(tokenizer)


@lru_cache(maxsize=8)
def _dialect_of(tokenizer: TokenizerWrapper) -> ModelDialect:
    # mlx-lm has response formats from 0.32.1 on.
    transitions = getattr(tokenizer, "response_transitions", {})
    return ModelDialect(
        ReasoningMarks.of(tokenizer),
        ToolFormat.of(tokenizer),
        tuple(
            (state, tuple((mark, then) for mark, then in edges))
            for state, edges in transitions.items()
        ),
        getattr(tokenizer, "response_initial_state", None),
        tuple(getattr(tokenizer, "structural_markers", ())),
    )
