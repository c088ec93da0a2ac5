"""``Dialect``: how a model marks reasoning and calls; ``AnswerFormat``: how an answer is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from mlx_paged.answers.calls import CallParser
from mlx_paged.answers.formats import (
    FORMATS,
    REASONING,
    CallFormat,
    Headed,
    ReasoningFormat,
    Tags,
    format_named,
)
from mlx_paged.answers.marks import Marks

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

ToolChoice: TypeAlias = "Literal['none', 'auto', 'required'] | str"
# For each state, the marks that end it, with the states that follow.
Transitions: TypeAlias = "tuple[tuple[str, tuple[tuple[str, str], ...]], ...]"
_BRACKETS = frozenset("<>[]|｜")


class Detokenizer(Protocol):
    """Converts tokens to text in complete characters."""

    def add(self, token_id: int) -> str:
        """The text that a token adds: empty while it ends within a character."""
        ...

    def finish(self) -> str:
        """The rest after the last token: a replacement for an incomplete character."""
        ...


@dataclass(frozen=True, eq=False)
class Dialect:
    """How a model marks reasoning and calls.

    Args:
        calls: the format of calls; ``None`` if it is unknown.
        reasoning: the marks around reasoning; ``None`` for a model without marks.
        marks: the control tokens among all these marks.
        special: those of them that are special tokens, which no text shows.
        reasoning_start, reasoning_end: the tokens of the marks around reasoning. After those of
            ``reasoning_end``, the answer follows.
        transitions, initial_state: of the tokenizer's own response format, if it has one.
    """

    calls: CallFormat | None = None
    reasoning: ReasoningFormat | None = None
    marks: Marks = field(default_factory=Marks)
    special: frozenset[str] = frozenset()
    reasoning_start: tuple[int, ...] = ()
    reasoning_end: tuple[int, ...] = ()
    transitions: Transitions = ()
    initial_state: str | None = None

    @classmethod
    def of(cls, tokenizer: TokenizerWrapper) -> Dialect:
        """The dialect of a tokenizer's model."""
        return _dialect_of(tokenizer)

    @classmethod
    def of_tokens(
        cls,
        calls: CallFormat | None,
        reasoning: ReasoningFormat | None,
        added: Mapping[str, tuple[int, bool]],
        encode: Callable[[str], Sequence[int]] = lambda text: (),
        transitions: Transitions = (),
        initial_state: str | None = None,
    ) -> Dialect:
        """The dialect of formats in a vocabulary.

        Args:
            added: the id of each added token, and whether it is special.
            encode: of the tokenizer.
        """
        texts = [*marks_of(calls), *(reasoning.all_marks if reasoning else ())]
        texts += [mark for _, edges in transitions for mark, _ in edges]
        control = {
            text: token
            for text, (token, _) in added.items()
            if _BRACKETS & set(text) and any(text in mark for mark in texts)
        }
        start, end = ("", "") if reasoning is None else (
            reasoning.start, reasoning.forced_end or reasoning.end
        )  # fmt: skip
        return cls(
            calls,
            reasoning,
            Marks(control),
            frozenset(text for text in control if added[text][1]),
            tuple(encode(start)),
            tuple(encode(end)),
            transitions,
            initial_state,
        )

    @property
    def is_harmony(self) -> bool:
        """Whether answers consist of harmony's messages."""
        return self.calls is not None and self.calls.engine == "harmony"

    def token_of(self, mark: str) -> int | None:
        """The token that a mark is; ``None`` if it is more than one, or text."""
        parts = self.marks.split(mark)
        return parts[0] if len(parts) == 1 and isinstance(parts[0], int) else None

    @property
    def message_end(self) -> tuple[int, ...]:
        """The token that ends a message of harmony's; empty for other models."""
        token = self.token_of("<|end|>") if self.is_harmony else None
        return () if token is None else (token,)

    @property
    def text_header(self) -> tuple[int, ...]:
        """The tokens before the text of an answer in harmony; empty for other models."""
        channel = self.token_of("<|channel|>")
        if not self.is_harmony or channel not in self.reasoning_end:
            return ()
        return self.reasoning_end[self.reasoning_end.index(channel) :]

    @property
    def call_end_token(self) -> int | None:
        """The token that ends a call, if it is one."""
        if self.calls is None:
            return None
        shape, ends = self.calls.shape, [self.calls.end]
        if isinstance(shape, Headed):
            ends = [*shape.end, *ends]
        elif isinstance(shape, Tags):
            ends = [shape.call_end, *ends]
        return next((token for end in ends if (token := self.token_of(end)) is not None), None)

    def opens_reasoning(self, prompt: str) -> bool:
        """Whether an answer to this prompt begins within reasoning."""
        if self.reasoning is None:
            return False
        if self.calls is not None and self.calls.begins_in_reasoning:
            return not self.closes_reasoning(prompt)
        return prompt.rstrip().endswith(self.reasoning.start)

    def closes_reasoning(self, prompt: str) -> bool:
        """Whether the prompt ends with closed reasoning, so that an answer has none."""
        return self.reasoning is not None and prompt.rstrip().endswith(self.reasoning.end)

    def without_empty_pair(self, prompt: str) -> str | None:
        """The prompt without the empty pair of marks at its end, which templates write if thinking
        is off; ``None`` if there is none.
        """
        if self.reasoning is None or self.is_harmony or not self.closes_reasoning(prompt):
            return None
        body = prompt.rstrip()[: -len(self.reasoning.end)].rstrip()
        start = self.reasoning.start
        return body[: -len(start)] if body.endswith(start) else None


PLAIN_DIALECT = Dialect()


@dataclass(frozen=True)
class AnswerFormat:
    """How the answers to a prompt are read.

    Args:
        is_thinking: whether the prompt has opened the reasoning already.
        tools: the functions that may be called, in the form of OpenAI's ``tools``.
        calls: how calls are written; ``None``: what looks like a call is text.
        max_calls: further calls are dropped; ``None``: no limit.
        hides_special: whether special tokens in the text are left out.
        opening: of harmony's messages, the beginning that the prompt has written.
        detokenizer: makes what converts tokens to text, for counts of tokens.
        skipped: special tokens, which add no text.
    """

    dialect: Dialect = PLAIN_DIALECT
    is_thinking: bool = False
    tools: tuple[Mapping[str, Any], ...] = ()
    calls: CallFormat | None = None
    max_calls: int | None = None
    hides_special: bool = True
    opening: str = ""
    detokenizer: Callable[[], Detokenizer] | None = None
    skipped: frozenset[int] = frozenset()

    @classmethod
    def of(
        cls,
        tokenizer: TokenizerWrapper,
        prompt: str = "",
        tools: Sequence[Mapping[str, Any]] = (),
        max_calls: int | None = None,
    ) -> AnswerFormat:
        """The format of the answers of a tokenizer's model to a prompt, as it was rendered."""
        return cls.for_prompt(Dialect.of(tokenizer), prompt, tools, max_calls)

    @classmethod
    def for_prompt(
        cls,
        dialect: Dialect,
        prompt: str = "",
        tools: Sequence[Mapping[str, Any]] = (),
        max_calls: int | None = None,
    ) -> AnswerFormat:
        """The format of answers in a dialect to a prompt, as it was rendered."""
        opening = ""
        if dialect.is_harmony:
            _, mark, rest = prompt.rpartition("<|start|>")
            header, message, _ = rest.partition("<|message|>")
            opening = dialect.marks.encode(header + message) if mark else ""
        return cls(
            dialect,
            dialect.opens_reasoning(prompt) and not dialect.is_harmony,
            tuple(tools),
            dialect.calls if tools or dialect.is_harmony else None,
            max_calls,
            opening=opening,
        )

    @property
    def marks(self) -> Marks:
        """The control tokens among the marks."""
        return self.dialect.marks

    @property
    def has_marks(self) -> bool:
        """Whether an answer may have anything but text."""
        dialect = self.dialect
        return bool(self.calls or dialect.reasoning or dialect.transitions)

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of the tools."""
        functions = [tool.get("function") for tool in self.tools]
        return frozenset(each["name"] for each in functions if isinstance(each, Mapping))

    @property
    def is_harmony(self) -> bool:
        """Whether answers consist of harmony's messages."""
        return self.dialect.is_harmony and (self.calls is None or self.calls.engine == "harmony")

    def parser(self) -> CallParser:
        """A reader of calls."""
        assert self.calls is not None
        return CallParser(self.calls, self.marks, self.tools)


PLAIN = AnswerFormat()


@lru_cache(maxsize=8)
def _dialect_of(tokenizer: TokenizerWrapper) -> Dialect:
    calls = _calls_of(tokenizer)
    # mlx-lm has response formats from 0.32.1 on.
    transitions = tuple(
        (state, tuple((mark, then) for mark, then in edges))
        for state, edges in getattr(tokenizer, "response_transitions", {}).items()
    )
    return Dialect.of_tokens(
        calls,
        _reasoning_of(tokenizer, calls),
        _added_tokens(tokenizer),
        lambda text: tokenizer.encode(text, add_special_tokens=False),
        transitions,
        getattr(tokenizer, "response_initial_state", None),
    )


def _added_tokens(tokenizer: TokenizerWrapper) -> dict[str, tuple[int, bool]]:
    """The id of each added token, and whether it is special."""
    # A tokenizer may be third-party code, and lack these attributes.
    added = getattr(tokenizer, "added_tokens_decoder", {})
    tokens = {str(entry.content): (token, bool(entry.special)) for token, entry in added.items()}
    vocabulary = tokenizer.get_vocab()
    for text in getattr(tokenizer, "all_special_tokens", ()):
        if text in vocabulary:
            tokens[text] = vocabulary[text], True
    return tokens


def _calls_of(tokenizer: TokenizerWrapper) -> CallFormat | None:
    """The format of calls: the one whose parser mlx-lm has found, or one of the table that the chat
    template writes, or whose tokens the vocabulary has.
    """
    parser = tokenizer.tool_parser
    if tokenizer.tool_call_start and parser is not None:
        found = format_named(str(parser.__module__).rpartition(".")[2])
        if found is not None:
            return found
    template = tokenizer.chat_template
    if isinstance(template, str):
        for each in FORMATS:
            if each.templates and all(text in template for text in each.templates):
                return each
    vocabulary = tokenizer.get_vocab()
    for each in FORMATS:
        if each.vocabulary and all(token in vocabulary for token in each.vocabulary):
            return each
    return None


def _reasoning_of(tokenizer: TokenizerWrapper, calls: CallFormat | None) -> ReasoningFormat | None:
    name = "harmony" if calls is not None and calls.engine == "harmony" else ""
    vocabulary = tokenizer.get_vocab()
    for each in REASONING:
        if each.name != name:
            continue
        if all(token in vocabulary for token in each.tokens):
            return each
    template = tokenizer.chat_template
    # Some models spell the marks out, as the first Magistral does.
    if isinstance(template, str) and "<think>" in template and "</think>" in template:
        return REASONING[0]
    return None


def marks_of(calls: CallFormat | None) -> Iterable[str]:
    """The texts in which a format of calls has control tokens."""
    if calls is None:
        return ()
    marks = [calls.start, calls.end, calls.quote, *calls.other_starts, *calls.other_ends]
    shape = calls.shape
    if isinstance(shape, Tags):
        marks += [shape.call, shape.argument, shape.argument_end, shape.call_end]
        marks += shape.json or ()
    if isinstance(shape, Headed):
        marks += [*shape.head, *shape.end]
    if calls.engine == "harmony":
        marks += calls.vocabulary
    return marks
