"""``AnswerReader``: tells reasoning, text and calls of tools apart as an answer is generated.

What is read doesn't depend on how the text is cut into pieces. A call is reported once it is
complete. What turns out to be no call is text, every character of it; so is a call in a code span
or in quotation marks, and one within reasoning that closes later.
"""

from __future__ import annotations

import logging
import secrets
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol

import regex

from mlx_paged.answers.calls import Call, CallParser, Found
from mlx_paged.answers.code_spans import CodeSpans, wait_for
from mlx_paged.answers.cursor import Cursor, NotACallError, Sought, Steps, TruncatedError
from mlx_paged.answers.dialect import AnswerFormat, Dialect, marks_of
from mlx_paged.answers.events import Event, ToolCall
from mlx_paged.answers.formats import CallFormat, ReasoningFormat
from mlx_paged.answers.harmony import HarmonyMessage, read_messages
from mlx_paged.answers.marks import MarkFinder, Marks

LOG = logging.getLogger("mlx_paged.server")

TEXT, REASONING = "normal", "reasoning"
# Of a call within reasoning, after a mark that closes reasoning.
MAX_QUOTED_CHARACTERS = 4_096
_NUM_AHEAD = 256
_ID_CHARACTERS = string.ascii_letters + string.digits


class Part(Protocol):
    """A part of a completion, as the engine reports it."""

    @property
    def text(self) -> str: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def finish_reason(self) -> str | None: ...
    @property
    def stop_reason(self) -> object: ...


@dataclass
class Span:
    """Where reasoning lies in the text of an answer, in characters.

    Args:
        begin, end: with its marks; ``end`` is ``None`` while it goes on.
        inner_begin, inner_end: without its marks.
    """

    begin: int
    inner_begin: int
    inner_end: int | None = None
    end: int | None = None

    def __contains__(self, place: int) -> bool:
        return self.begin <= place and (self.end is None or place < self.end)


class Reading(NamedTuple):
    """A whole answer.

    Args:
        calls: the name and the JSON text of the arguments of each call.
    """

    reasoning: str
    text: str
    calls: tuple[tuple[str, str], ...]


def read_answer(answer_format: AnswerFormat, text: str, completion: Part | None = None) -> Reading:
    """Read a whole answer; ``completion`` as in :meth:`AnswerReader.finish`."""
    reader = AnswerReader(answer_format)
    texts = {"reasoning": "", "text": ""}
    calls: list[tuple[str, str]] = []
    for kind, piece, call in reader.add(text) + reader.finish(completion):
        if call is not None:
            calls.append((call.name, piece))
        else:
            texts[kind] += piece
    return Reading(**texts, calls=tuple(calls))


def new_call_id(*, is_short: bool = False) -> str:
    """An id for a call. The templates of Mistral's older models require nine letters and digits."""
    length, prefix = (9, "") if is_short else (24, "call_")
    return prefix + "".join(secrets.choice(_ID_CHARACTERS) for _ in range(length))


class AnswerReader:
    """Reads one answer.

    White space beside marks is neither reasoning nor text, unless text follows it.

    Attributes:
        num_tool_calls: the number of calls so far.
        spans: where reasoning lies in the text.
    """

    def __init__(self, answer_format: AnswerFormat):
        self.num_tool_calls = 0
        self.spans: list[Span] = []
        self._format = answer_format
        self._marks, self._has_marks = answer_format.marks, answer_format.has_marks
        self._rules = _rules_of(
            answer_format.dialect, answer_format.calls, answer_format.hides_special
        )
        self._parser: CallParser | None = None
        self._cursor = Cursor()
        self._num_dropped = 0  # characters before the cursor's text
        self._events: list[Event] = []
        self._candidate: Found | None = None
        self._mark = ""  # that begins the candidate
        self._call_end = 0  # of its last complete call
        self._code = CodeSpans()
        self._space = ""  # shown once text follows
        self._has_text = False  # of the answer, reasoning apart
        self._is_after_mark = False
        self._is_after_call = False
        self._state = answer_format.dialect.initial_state or TEXT
        if answer_format.is_thinking:
            self._enter(REASONING, 0)
        if answer_format.is_harmony:
            self._begin_harmony()

    @property
    def is_text(self) -> bool:
        """Whether what follows is text, as far as is known: neither reasoning nor a call."""
        return self._state == TEXT and (self._candidate is None or self._format.is_harmony)

    @property
    def is_reasoning(self) -> bool:
        """Whether what follows is reasoning, as far as is known."""
        return self._state == REASONING

    @property
    def num_pending(self) -> int:
        """How many characters at the end of the text are not decided yet."""
        return len(self._cursor.text) + self._cursor.num_held

    def add(self, text: str) -> list[Event]:
        """The events that are certain after this text."""
        return self._read() if self._cursor.add(text) else []

    def read(self, part: Part) -> list[Event]:
        """The events of the next part of a completion."""
        events = self.add(part.text)
        return events if part.finish_reason is None else events + self.finish(part)

    def finish(self, completion: Part | None = None) -> list[Event]:
        """The events that were held back, at the end of the answer.

        Args:
            completion: says why the answer ended. If it was not the model that ended it, which is
                the default, the call that it broke off is dropped.
        """
        is_cut = completion is not None and (
            completion.finish_reason != "stop" or isinstance(completion.stop_reason, str)
        )
        self._cursor.end(is_cut=is_cut)
        events = self._read()
        if self._state == TEXT and self._space and not (self._is_after_mark or self._is_after_call):
            events.append(Event("text", self._space))
        self._space = ""
        return events

    # The text from mark to mark.

    def _read(self) -> list[Event]:
        while self._step():
            pass
        events, self._events = self._events, []
        return events

    def _step(self) -> bool:
        """Read the next element; returns whether there may be more to read."""
        if self._candidate is not None:
            return self._read_candidate(self._candidate)
        cursor = self._cursor
        if not cursor.text:
            return False
        finder = self._rules.finders[self._state]
        place, mark = finder.find(cursor.text, cursor.is_complete)
        if self._rules.begins_answers and self._is_opening and self._begins_answer(place):
            return True
        if cursor.is_cut and (half := finder.find_half(cursor.text, self._rules.starts)) < (
            place if mark else len(cursor.text)
        ):
            place, mark = half, ""
        self._show(cursor.text[:place])
        if not mark:
            self._drop(len(cursor.text) if cursor.is_cut else place)
            return False
        self._drop(place)
        self._take(mark, finder.actions[mark])
        return True

    @property
    def _is_opening(self) -> bool:
        return self._state == TEXT and not self._has_text and not self.num_tool_calls

    def _begins_answer(self, place: int) -> bool:
        """Whether an answer that begins as a call was found, which is its first text."""
        text = self._cursor.text[:place]
        body = text.lstrip()
        if body[:1] not in ("{", "["):
            return False
        self._show(text[: len(text) - len(body)])
        self._drop(len(text) - len(body))
        self._begin_candidate("")
        return True

    def _drop(self, count: int) -> None:
        self._num_dropped += count
        self._cursor.text = self._cursor.text[count:]
        self._cursor.place = 0

    def _take(self, mark: str, action: str) -> None:
        if action == "call":
            self._begin_candidate(mark)
        elif action in ("text", "drop") or self._is_text_here(mark, action):
            self._show_mark(mark, is_hidden=action == "drop")
        elif action == self._state == TEXT:
            self._drop(len(mark))  # a lone closing mark
        else:
            if action != self._state:
                self._enter(action, len(mark))
            self._drop(len(mark))
            self._space, self._is_after_mark = "", True

    def _is_text_here(self, mark: str, state: str) -> bool:
        """Whether a mark of reasoning is text at this place."""
        if self._state == REASONING:  # an opening mark again is none right after the first
            return state == REASONING and not self._is_after_mark
        if self._state != TEXT or state not in (TEXT, REASONING):
            return False
        is_spelled_out = state == REASONING and self._marks.decode(mark) == mark
        return self._code.after(self._space).is_open or (
            is_spelled_out and not (self._is_opening or self._is_after_mark)
        )

    def _show_mark(self, mark: str, *, is_hidden: bool) -> None:
        self._drop(len(mark))
        if not is_hidden or self._code.after(self._space).is_open:
            self._show(mark)

    def _enter(self, state: str, mark_length: int) -> None:
        place = self._num_dropped
        if state == REASONING:
            self.spans.append(Span(place, place + mark_length))
        elif self._state == REASONING:
            self._close_span(place + mark_length)
        self._state = state
        self._space, self._is_after_mark = "", True

    def _close_span(self, end: int) -> None:
        self.spans[-1].inner_end, self.spans[-1].end = self._num_dropped, end

    def _show(self, text: str) -> None:
        """Report a text without marks, and hold back the white space at its end."""
        text, self._space = self._space + text, ""
        body = text.lstrip()
        if not body and not (self._rules.is_exact and text):
            self._space = text
            return
        if self._is_after_mark and not self._rules.is_exact:
            text = _without_margin(text[: len(text) - len(body)]) + body
        self._is_after_mark = False
        if self._rules.holds_space:
            self._space = text[len(text.rstrip()) :]
            text = text.rstrip()
        if self._state in (TEXT, REASONING):
            self._report(text)

    def _report(self, text: str) -> None:
        text = self._marks.decode(text)
        if self._state == REASONING:
            self._events.append(Event("reasoning", text))
            return
        self._has_text, self._is_after_call = True, False
        self._events.append(Event("text", text))
        if self._has_marks:
            self._code.add(text)

    # Calls.

    def _begin_candidate(self, mark: str) -> None:
        if self._parser is None:
            self._parser = self._format.parser()
        self._mark, self._call_end = mark, 0
        cursor = self._cursor
        found = self._parser.parse(cursor, mark)
        is_quoted: Callable[[Cursor], Steps[bool]] | None = None
        if self._state == REASONING:
            is_quoted = self._is_draft
            found = self._bounded(found)
        else:
            is_quoted = self._code.after(self._space).closing()
        self._candidate = found if is_quoted is None else _unless(found, is_quoted, cursor)

    def _read_candidate(self, candidate: Found) -> bool:
        cursor = self._cursor
        try:
            call = next(candidate)
        except StopIteration:
            self._candidate = None
            self._end_candidate(cursor.place)
            return True
        except NotACallError as error:
            self._candidate = None
            cursor.stop_search()
            if isinstance(error, TruncatedError) and cursor.is_cut:
                self._drop(len(cursor.text))  # the truncated call
            elif self._call_end:
                self._end_candidate(self._call_end)
            elif not self._mark and cursor.text:
                self._show_first()
            else:
                LOG.debug("what begins with the mark of a call is none; it is text")
                self._show_mark(self._mark, is_hidden=False)
            return True
        if call is None:
            return False
        self._call_end = cursor.place
        self._call(call)
        return True

    def _show_first(self) -> None:
        """Show the first character of an answer that is no call, which is an opening bracket."""
        text = self._cursor.text[:1]
        self._drop(1)
        self._has_text = True
        self._show(text)

    def _end_candidate(self, end: int) -> None:
        """Leave out the text of calls, which has been read up to here."""
        is_within = self.is_reasoning
        if is_within:
            self._close_span(self._num_dropped)
        self._drop(end)
        if is_within:
            self.spans.append(Span(self._num_dropped, self._num_dropped))

    def _call(self, call: Call) -> None:
        index = self.num_tool_calls
        self.num_tool_calls += 1
        if self._has_text:
            self._is_after_call = True
        else:
            self._space, self._is_after_mark = "", True
        maximum = self._format.max_calls
        if maximum is not None and index >= maximum:
            return
        if call.name not in self._format.names:
            # Agents reply that the tool does not exist, and models then choose another one.
            LOG.warning("the model called a tool that is not in the request")
        calls = self._format.calls
        call_id = call.call_id or new_call_id(is_short=calls is not None and calls.has_short_ids)
        self._events.append(Event("call", call.arguments, ToolCall(index, call_id, call.name)))

    def _bounded(self, found: Found) -> Found:
        """Calls within reasoning, as long as few characters follow a mark that may have ended the
        reasoning in the middle of one: an argument may quote it, or a budget has forced it.
        """
        cursor, pattern = self._cursor, self._rules.reasoning_end.pattern
        mark, place = None, 0
        for call in found:
            end = len(cursor.text) if call is None else cursor.place
            if mark is None:
                mark = pattern.search(cursor.text, place, end)
                place = max(0, end - self._rules.longest_end)
            # An end mark may have to be read before a call is known to be complete.
            limit = MAX_QUOTED_CHARACTERS + (_NUM_AHEAD if call is None else 0)
            if mark is not None and end - mark.start() > limit:
                raise NotACallError
            yield call

    def _is_draft(self, cursor: Cursor) -> Steps[bool]:
        """Whether a call within reasoning is text: the reasoning closes after it."""
        begin = cursor.place
        try:
            yield from wait_for(cursor, self._rules.reasoning_end)
        except TruncatedError:
            if not cursor.is_cut:
                return False
            # A thought that goes on after the last call is truncated.
            end = self._marks.encode(self._format.calls.end if self._format.calls else "")
            rest = cursor.text[begin:]
            rest = (rest.rpartition(end)[2] if end else rest).strip()
            return bool(rest) and not rest.startswith(self._mark)
        return True

    # Harmony.

    def _begin_harmony(self) -> None:
        opening = self._format.opening
        self._state = "header"
        self._cursor.text = opening
        self._num_dropped = -len(opening)
        self._candidate = read_messages(self._cursor, self._format, self._harmony)
        self._step()

    def _harmony(
        self,
        message: HarmonyMessage,
        text: str,
        begin: int,
        end: int,
        is_ended: bool,
        mark_length: int,
    ) -> None:
        """Take a piece of a message, which lies here in the cursor's text. The first is empty, and
        lies where its header does.
        """
        if self._state == "header":
            self._state = REASONING if message.is_reasoning else TEXT
            if message.is_reasoning:
                place = self._num_dropped
                self.spans.append(Span(max(0, place + begin), max(0, place + end)))
        if text:
            self._report(text)
        self._drop(end)
        if is_ended:
            if message.is_reasoning:
                self.spans[-1].inner_end = self._num_dropped - mark_length
                self.spans[-1].end = self._num_dropped
            self._state = "header"


def _unless(found: Found, is_quoted: Callable[[Cursor], Steps[bool]], cursor: Cursor) -> Found:
    """The calls of a parser, unless what follows shows that they are quoted."""
    calls = []
    for call in found:
        if call is None:
            yield None
        else:
            calls.append(call)
    end = cursor.place
    if (yield from is_quoted(cursor)):
        raise NotACallError
    cursor.place = end
    yield from calls


class _Rules:
    """What is looked for in each state of an answer; the same for all answers of a format."""

    def __init__(self, dialect: Dialect, calls: CallFormat | None, hides_special: bool):
        marks = dialect.marks
        parser = None if calls is None else CallParser(calls, marks, ())
        self.starts = parser.starts if parser is not None else []
        self.begins_answers = parser is not None and parser.begins_answers
        self.is_exact = dialect.reasoning is not None and dialect.reasoning.is_exact
        states: dict[str, dict[str, str]] = {TEXT: {}, REASONING: {}}
        of_calls = "".join(marks_of(calls))
        for actions in states.values():
            for mark in marks.token_ids:
                is_hidden = hides_special and mark in dialect.special and mark not in of_calls
                actions[marks.encode(mark)] = "drop" if is_hidden else "text"
            actions.update(dict.fromkeys(self.starts, "call"))
        self.reasoning_end, self.longest_end = Sought("(?!)", ""), 0
        if dialect.reasoning is not None:
            self._add_reasoning(dialect.reasoning, marks, states)
        for state, edges in dialect.transitions:
            own = states.setdefault(state, {})
            for mark, then in edges:
                if then != "tool":
                    own[marks.encode(mark)] = then
                elif self.starts:
                    own[marks.encode(mark)] = "call"
        self.finders = {state: MarkFinder(edges) for state, edges in states.items()}
        self.holds_space = not self.is_exact and any(
            action not in ("drop", "text") for action in states[TEXT].values()
        )

    def _add_reasoning(
        self, reasoning: ReasoningFormat, marks: Marks, states: dict[str, dict[str, str]]
    ) -> None:
        start = marks.encode(reasoning.start)
        ends = [marks.encode(each) for each in (reasoning.end, *reasoning.other_ends)]
        for mark in map(marks.encode, reasoning.hidden):
            states[TEXT][mark] = states[REASONING][mark] = "drop"
        states[TEXT][start] = states[REASONING][start] = REASONING
        for end in ends:
            states[REASONING][end] = TEXT
        if marks.encode(reasoning.end) != reasoning.end:
            states[TEXT][ends[0]] = TEXT
        self.reasoning_end = Sought(
            "|".join(map(regex.escape, ends)), "".join(end[0] for end in ends)
        )
        self.longest_end = max(map(len, ends))


@lru_cache(maxsize=32)
def _rules_of(dialect: Dialect, calls: CallFormat | None, hides_special: bool) -> _Rules:
    return _Rules(dialect, calls, hides_special)


def _without_margin(space: str) -> str:
    """What remains of the white space between a mark and a text: the indentation of the text, if it
    begins on a new line.
    """
    return space[space.rfind("\n") + 1 :] if "\n" in space else ""
