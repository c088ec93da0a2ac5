"""``AnswerReader``: parses the text of an answer, as it is generated, into reasoning, text and tool
calls.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeAlias

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged.engine.token_rules import special_token_ids
from mlx_paged.model_dialect import Marks, ModelDialect, ToolFormat
from mlx_paged.reasoning import ReasoningMarks
from mlx_paged.request import CompletionOutput
from mlx_paged.server.answers.events import Event
from mlx_paged.server.answers.tools import CallReader, JsonCallReader

ToolChoice: TypeAlias = "Literal['none', 'auto', 'required'] | str"

# The states of the parser. A tokenizer's own response format may have further states, whose text is
# not shown.
OPENING = "opening"  # before any text, so reasoning may begin
SAYING = "normal"
REASONING = "reasoning"
CALLING = "tool"


@dataclass(frozen=True)
class AnswerFormat:
    """How answers to a prompt are parsed.

    Args:
        reasoning: the marks around reasoning; ``None`` if the model has none.
        is_thinking: whether the prompt has opened the reasoning already.
        tools: the functions that may be called, in the form of OpenAI's ``tools``; if empty, what
            looks like a call is text.
        tool_format: how the model writes calls; ``None``: what looks like a call is text.
        is_calls: the reasoning is followed by calls only, without a mark before them.
        max_calls: further calls are dropped; ``None``: no limit.
        hidden: special tokens in the text that are not shown. Empty if no mark is a special token,
            since the text then contains none.
        marks: further marks, from the tokenizer's own response format.
        initial_state: the initial state of such a format.
    """

    reasoning: ReasoningMarks | None = None
    is_thinking: bool = False
    tools: tuple[dict[str, Any], ...] = field(default_factory=tuple)
    tool_format: ToolFormat | None = None
    is_calls: bool = False
    max_calls: int | None = None
    hidden: tuple[str, ...] = ()
    marks: Marks = ()
    initial_state: str | None = None

    @classmethod
    def of(
        cls,
        tokenizer: TokenizerWrapper,
        prompt: str = "",
        tools: Sequence[dict[str, Any]] = (),
        max_calls: int | None = None,
    ) -> AnswerFormat:
        """The format of the answers to a prompt.

        Args:
            prompt: the rendered prompt; it may end with the mark that opens reasoning.
        """
        dialect = ModelDialect.of(tokenizer)
        marks, tool_format = dialect.reasoning, dialect.tools if tools else None
        texts = [mark for _, edges in dialect.transitions for mark, _ in edges]
        texts += [marks.start, marks.end] if marks else []
        texts += [tool_format.start, tool_format.end] if tool_format else []
        special = _special_tokens(tokenizer)
        has_special = any(token in text for token in special for text in texts)
        return cls(
            marks,
            marks is not None and marks.are_opened_by(prompt),
            tuple(tools),
            tool_format,
            False,
            max_calls,
            (*dialect.markers, *special) if has_special else (),
            dialect.transitions,
            dialect.initial_state,
        )

    def edges(self) -> dict[str, dict[str, str]]:
        """For each state, the marks that are recognised in it and the states that they lead to."""
        states: dict[str, dict[str, str]] = {OPENING: {}, SAYING: {}, REASONING: {}}
        for state in states:
            states[state].update((mark, state) for mark in self.hidden)
        if self.reasoning:
            states[OPENING][self.reasoning.start] = REASONING
            states[REASONING][self.reasoning.end] = SAYING
        own = {state: dict(edges) for state, edges in self.marks}
        if self.tool_format is not None and self.tool_format.start:
            start = self.tool_format.start
            is_own = any(CALLING in edges.values() for edges in own.values())
            for state in (REASONING,) if is_own else (OPENING, SAYING, REASONING):
                states[state][start] = CALLING
        for state, edges in own.items():
            for name in (OPENING, SAYING) if state == SAYING else (state,):
                states.setdefault(name, {}).update(edges)
        if self.tool_format is None:
            for edges in states.values():
                for mark in [mark for mark, state in edges.items() if state == CALLING]:
                    del edges[mark]
        return states


PLAIN = AnswerFormat()


class AnswerReader:
    """Parses the text of one completion incrementally. The result does not depend on how the text
    is cut into pieces.

    White space next to a mark belongs to the mark: it is neither reasoning nor text.

    Attributes:
        num_tool_calls: the number of calls so far.
    """

    def __init__(self, answer_format: AnswerFormat):
        self.num_tool_calls = 0
        self._format = answer_format
        self._finders = _finders(
            tuple((state, tuple(edges.items())) for state, edges in answer_format.edges().items())
        )
        is_thinking = answer_format.is_thinking
        self._state = answer_format.initial_state or (REASONING if is_thinking else OPENING)
        self._calls: CallReader | None = None
        self._pending = ""  # unread text, possibly the beginning of a mark
        self._space = ""  # shown once something other than a mark follows
        self._is_after_mark = is_thinking

    def add(self, text: str) -> list[Event]:
        """The events that are certain after this text."""
        self._pending += text
        return self._read(is_over=False)

    def read(self, part: CompletionOutput) -> list[Event]:
        """The events of the next part of the completion."""
        events = self.add(part.text)
        return events if part.finish_reason is None else events + self.finish(part)

    def finish(self, completion: CompletionOutput | None = None) -> list[Event]:
        """The events that were held back, at the end of the answer.

        Args:
            completion: says why the answer ended. A call without an end mark is accepted if the
                model ended the answer, which is the default; it is text if the answer was truncated
                by ``max_tokens``, a stop text or something else.
        """
        is_truncated = completion is not None and (
            completion.finish_reason != "stop" or isinstance(completion.stop_reason, str)
        )
        events = self._read(is_over=True)
        if self._calls is not None:
            calls, self._calls = self._calls, None
            events += self._of_calls(calls, calls.finish(is_truncated))
        elif self._state in (SAYING, OPENING) and not self._is_after_mark:
            events.append(Event("text", self._space))
        self._space = ""
        return [event for event in events if event.kind != "text" or event.text]

    def _read(self, is_over: bool) -> list[Event]:
        events: list[Event] = []
        while self._pending:
            if self._calls is not None:
                self._read_calls(self._calls, events)
                continue
            finder = self._finders[self._state]
            place, mark = finder.find(self._pending, is_over)
            if self._pending[:place].strip():
                if self._format.is_calls and self._state in (OPENING, SAYING):
                    self._begin_calls()
                    continue
                if self._state == OPENING:
                    self._state = SAYING
                    continue
            self._show(self._pending[:place], events)
            self._pending = self._pending[place + len(mark) :]
            if not mark:
                break
            self._take(mark, finder.edges[mark])
        return events

    def _read_calls(self, calls: CallReader, events: list[Event]) -> None:
        events += self._of_calls(calls, calls.add(self._pending))
        self._pending = calls.rest or ""
        if calls.rest is not None:
            self._calls = None
            self._is_after_mark = True

    def _of_calls(self, calls: CallReader, events: list[Event]) -> list[Event]:
        """The events of calls; within reasoning, a call that is returned as text is reasoning."""
        self.num_tool_calls += sum(event.call is not None for event in events)
        if self._state != REASONING:
            return events
        return [Event("reasoning", each.text) if each.kind == "text" else each for each in events]

    def _take(self, mark: str, state: str) -> None:
        if state == self._state:
            return  # a special token without a meaning here
        self._space = ""
        self._is_after_mark = True
        if state == CALLING:
            self._begin_calls()
        else:
            self._state = state

    def _begin_calls(self) -> None:
        tool_format, tools = self._format.tool_format, self._format.tools
        assert tool_format is not None
        reader = JsonCallReader if tool_format.name == "json_tools" else CallReader
        self._calls = reader(tool_format, tools, self.num_tool_calls, self._format.max_calls)
        if self._state == OPENING:
            self._state = SAYING

    def _show(self, text: str, events: list[Event]) -> None:
        """Add an event for a text without marks, and hold back the white space at its end."""
        text, self._space = self._space + text, ""
        body = text.lstrip()
        if not body:
            self._space = text
            return
        if self._is_after_mark:
            text = _without_margin(text[: len(text) - len(body)]) + body
            self._is_after_mark = False
        if self._finders[self._state].can_leave or self._state == REASONING:
            self._space = text[len(text.rstrip()) :]
            text = text.rstrip()
        if self._state == REASONING:
            events.append(Event("reasoning", text))
        elif self._state in (OPENING, SAYING):
            events.append(Event("text", text))


class Reading(NamedTuple):
    """A parsed answer.

    Args:
        calls: the name and the JSON text of the arguments of each tool call.
    """

    reasoning: str
    text: str
    calls: tuple[tuple[str, str], ...]


def read_answer(
    answer_format: AnswerFormat, text: str, completion: CompletionOutput | None = None
) -> Reading:
    """Parse a complete answer; ``completion`` as in :meth:`AnswerReader.finish`."""
    reader = AnswerReader(answer_format)
    texts = {"reasoning": "", "text": ""}
    calls: list[tuple[str, str]] = []
    for kind, piece, call, _ in reader.add(text) + reader.finish(completion):
        if call is not None:
            calls.append((call.name, piece))
        elif kind == "call":
            calls[-1] = (calls[-1][0], calls[-1][1] + piece)
        else:
            texts[kind] += piece
    return Reading(**texts, calls=tuple(calls))


class _MarkFinder:
    """Finds the first of several marks in a growing text.

    Args:
        edges: the marks and the states that they lead to.

    Attributes:
        can_leave: whether a mark leads to another state.
    """

    def __init__(self, state: str, edges: Mapping[str, str]):
        self.edges = edges
        self.can_leave = any(next_state != state for next_state in edges.values())
        # At the same position, the longer mark is preferred.
        marks = sorted(edges, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, marks))) if marks else None
        self._beginnings = frozenset(mark[:length] for mark in marks for length in range(len(mark)))
        self._longest = max(map(len, marks), default=0)

    def find(self, text: str, is_over: bool) -> tuple[int, str]:
        """The position of the first mark, and the mark; or the position where an incomplete mark
        may begin, and ``""``.
        """
        if self._pattern is None:
            return len(text), ""
        found = self._pattern.search(text)
        if not is_over:
            limit = len(text) if found is None else found.start() + 1
            for place in range(max(0, len(text) - self._longest + 1), limit):
                if text[place:] in self._beginnings:
                    return place, ""
        if found is None:
            return len(text), ""
        return found.start(), found[0]


@lru_cache(maxsize=32)
def _finders(states: Marks) -> dict[str, _MarkFinder]:
    return {state: _MarkFinder(state, dict(edges)) for state, edges in states}


@lru_cache(maxsize=8)
def _special_tokens(tokenizer: TokenizerWrapper) -> tuple[str, ...]:
    """The texts of the special tokens."""
    names = tokenizer.convert_ids_to_tokens(sorted(special_token_ids(tokenizer)))
    return tuple(name for name in names if isinstance(name, str) and name)


def _without_margin(space: str) -> str:
    """What remains of the white space between a mark and a text: the indentation of the text, if it
    begins on a new line.
    """
    return space[space.rfind("\n") + 1 :] if "\n" in space else ""
