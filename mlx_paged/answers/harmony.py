"""Reads the messages of gpt-oss (harmony): each has a header, which says for whom it is."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import regex

from mlx_paged.answers.calls import Call, Found
from mlx_paged.answers.cursor import Cursor, Sought, Steps, TruncatedError
from mlx_paged.answers.dialect import AnswerFormat
from mlx_paged.answers.literals import as_json
from mlx_paged.answers.marks import Marks

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
FUNCTIONS = "functions."
_RECIPIENT = re.compile(r"to=([^\s<\ud800-\udbff]+)")
_WORD = re.compile(r"\s*(\w+)")


class HarmonyMessage(NamedTuple):
    """The header of a message."""

    channel: str
    recipient: str

    @property
    def is_call(self) -> bool:
        """Whether it calls a function."""
        return self.recipient.startswith(FUNCTIONS)

    @property
    def is_reasoning(self) -> bool:
        """Whether it is reasoning."""
        return self.channel == "analysis" and not self.recipient

    @property
    def is_shown(self) -> bool:
        """Whether readers see it: it is for no tool."""
        return not self.recipient or self.recipient in ("assistant", "user", "all")


Report = Callable[[HarmonyMessage, str, int, int, bool, int], None]


def read_messages(cursor: Cursor, form: AnswerFormat, report: Report) -> Found:
    """Read messages to the end of the answer, and yield their calls.

    Args:
        report: called with pieces of messages that are no calls, and where they lie in the cursor's
            text; it removes the text up to there.
    """
    marks = form.marks
    patterns = _Patterns(marks)
    while True:
        begin = cursor.place
        message = yield from _read_header(cursor, patterns, marks)
        if message is None:
            return
        if message.recipient in form.names:  # without its name space
            message = message._replace(recipient=FUNCTIONS + message.recipient)
        if message.is_call:
            yield from _read_call(cursor, patterns, marks, message, report)
        else:
            yield from _read_body(cursor, patterns, message, begin, report)


class _Patterns:
    def __init__(self, marks: Marks):
        def any_of(*texts: str) -> str:
            return "|".join(regex.escape(marks.encode(text)) for text in texts)

        def first_of(*texts: str) -> str:
            return "".join(marks.encode(text)[0] for text in texts)

        self.header_end = Sought(
            f"(?P<message>{any_of(MESSAGE)})|(?P<end>{any_of(*ENDS)})|(?P<start>{any_of(START)})",
            first_of(MESSAGE, *ENDS, START),
        )
        self.body_end = Sought(any_of(*ENDS, START, CHANNEL), first_of(*ENDS, START, CHANNEL))
        self.call_end = Sought(any_of(*ENDS), first_of(*ENDS))
        self.next_message = regex.compile(rf"\s*(?:{any_of(START)})")
        self.channel = marks.encode(CHANNEL)
        self.begins = tuple(marks.encode(text) for text in (START, CHANNEL))


def _read_header(cursor: Cursor, patterns: _Patterns, marks: Marks) -> Steps[HarmonyMessage | None]:
    """The next header; ``None`` at the end of the answer. A header without a message is dropped."""
    begin = cursor.place
    while True:
        try:
            found = yield from cursor.search(patterns.header_end)
        except TruncatedError:
            header = cursor.text[begin:]
            rest = header.rpartition(patterns.channel)[2]
            word = _WORD.match(rest)
            if (
                cursor.is_cut
                or word is None
                or word[1] != "final"
                or not rest[word.end() :].strip()
            ):
                cursor.place = len(cursor.text)
                return None
            cursor.place = begin + len(header) - len(rest) + word.end()
            return HarmonyMessage("final", "")
        if found["message"]:
            header = cursor.text[begin : found.start()]
            channel = _WORD.match(header.rpartition(patterns.channel)[2])
            recipient = _RECIPIENT.search(header)
            return HarmonyMessage(
                channel[1] if channel and patterns.channel in header else "",
                marks.decode(recipient[1]) if recipient else "",
            )
        begin = cursor.place


def _read_body(
    cursor: Cursor, patterns: _Patterns, message: HarmonyMessage, begin: int, report: Report
) -> Steps[None]:
    """Report the text of a message as it comes, up to what ends it."""
    report(message, "", begin, cursor.place, False, 0)
    while True:
        found = patterns.body_end.search(cursor.text, 0, is_complete=cursor.is_complete)
        end = len(cursor.text) if found is None else found.start()
        is_ended = found is not None and not found.partial
        stop = end
        if found is not None and is_ended and found[0] not in patterns.begins:
            stop = found.end()
        if end or is_ended:
            text = cursor.text[:end] if message.is_shown else ""
            report(message, text, 0, stop, is_ended, stop - end)
        if is_ended or cursor.is_complete:
            return
        length = len(cursor.text)
        while len(cursor.text) == length and not cursor.is_complete:
            yield


def _read_call(
    cursor: Cursor,
    patterns: _Patterns,
    marks: Marks,
    message: HarmonyMessage,
    report: Report,
) -> Found:
    begin = cursor.place
    while True:
        try:
            found = yield from cursor.search(patterns.call_end)
            end = found.start()
        except TruncatedError:
            cursor.place = end = len(cursor.text)
        text = marks.decode_json(cursor.text[begin:end]).strip()
        arguments = as_json(text or "{}")
        if arguments is not None and arguments.startswith("{"):
            if end < len(cursor.text) or not cursor.is_cut:
                yield Call(message.recipient.removeprefix(FUNCTIONS), arguments)
            return
        if end == len(cursor.text):
            break
        place = cursor.place
        try:
            is_last = (yield from cursor.find(patterns.next_message)) is not None
        except TruncatedError:
            is_last = True
        cursor.place = place
        if is_last:
            break
    if not cursor.is_cut or end < len(cursor.text):
        report(HarmonyMessage("final", ""), cursor.text[begin:end], begin, cursor.place, True, 0)
