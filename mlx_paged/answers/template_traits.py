"""What a chat template takes, found out by rendering small conversations, and the conversation that
says the same in the form that it takes.

Templates differ, and few of them say so: one demands that roles alternate, another writes a call
only if the content beside it is null, a third takes the arguments of a call as text. A template
that meets something else raises an error at best; at worst it leaves a message out.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from mlx_paged.answers.formats import CallFormat

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

Message: TypeAlias = "dict[str, Any]"
# Writes the calls of an answer as the model does.
WriteCalls: TypeAlias = "Callable[[Sequence[Message]], str]"

# Variables that make templates keep the reasoning of earlier answers: of Qwen 3.6 and Kimi K2.6, of
# GLM since 4.7, and of Nemotron 3.
KEEPS_REASONING = {
    "preserve_thinking": True,
    "clear_thinking": False,
    "truncate_history_thinking": False,
}
REMINDER = "<system-reminder>\n{}\n</system-reminder>"  # a message of the system, said by the user
_REMARK = "<assistant>\n{}\n</assistant>"  # one of the model, at the end of the message before
# The only ids of calls that templates of Mistral's models take.
_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")
_SEPARATOR = "\n\n"


class UnsayableError(ValueError):
    """A template has no way to write a message; the text says which and why."""


@dataclass(frozen=True)
class CallForm:
    """How a template takes the calls of a conversation.

    Attributes:
        arguments: whether they are an object or a JSON text, or the calls are part of the content,
            as the model writes them.
        content: of a message of calls without text.
        several: whether a message may have several calls, or each is a message of its own with its
            result after it.
        text: whether the text of a message with calls is beside them, a message of its own, or at
            the end of the message before.
        has_short_ids: whether the ids of calls have to be nine letters and digits.
    """

    arguments: Literal["object", "text", "content"] = "object"
    content: Literal[""] | None = ""
    several: Literal["beside", "apart", "lost"] = "beside"
    text: Literal["beside", "apart", "before"] = "beside"
    has_short_ids: bool = False


@dataclass(frozen=True)
class TemplateTraits:
    """What a chat template takes.

    Attributes:
        shows_tools: whether it shows the tools to the model.
        system: where messages of the system may be.
        repeats: the roles that may speak twice in turn.
        calls: ``None`` if it leaves out the calls of a conversation or their results.
    """

    shows_tools: bool = True
    system: Literal["anywhere", "first", "nowhere"] = "anywhere"
    repeats: frozenset[str] = frozenset({"user", "assistant"})
    calls: CallForm | None = CallForm()

    @classmethod
    def of(cls, tokenizer: TokenizerWrapper) -> TemplateTraits:
        """The traits of a tokenizer's template, which is tried at the first call."""
        return _traits_of(tokenizer, repr(tokenizer.chat_template))

    def adapt(
        self, messages: Sequence[Message], write_calls: WriteCalls | None = None
    ) -> list[Message]:
        """The conversation in the form that the template takes.

        Args:
            messages: whose contents are texts, and arguments of calls objects.
            write_calls: for a template that takes calls as a part of the content only; ``None`` if
                the model's way of writing them is unknown.

        Raises:
            UnsayableError: the template would leave something out.
        """
        adapted = list(messages)
        if any(message["role"] == "tool" or message.get("tool_calls") for message in messages):
            adapted = _with_calls(adapted, self.calls, write_calls)
        if any(message["role"] == "system" for message in messages):
            adapted = _with_system(adapted, self.system)
        return _merged(adapted, self.repeats)


# --- Adapting ---


def _with_calls(
    messages: Sequence[Message], form: CallForm | None, write_calls: WriteCalls | None = None
) -> list[Message]:
    """The messages with calls and results in a form."""
    if form is None or (form.arguments == "content" and write_calls is None):
        index, first = next(
            (index, each)
            for index, each in enumerate(messages)
            if each["role"] == "tool" or each.get("tool_calls")
        )
        what = "calls of tools" if first.get("tool_calls") else "the result of a tool"
        raise UnsayableError(
            f"messages[{index}] has {what}, which the model's chat template does not write"
        )
    adapted: list[Message] = []
    names: dict[str, str] = {}  # of tools, by the ids of their calls
    index = 0
    while index < len(messages):
        message = messages[index]
        index += 1
        calls = message.get("tool_calls")
        if not calls:
            is_result = message["role"] == "tool"
            adapted.append(_result(message, names, form) if is_result else message)
            continue
        calls = [_call(call, f"call_{index}_{number}", form) for number, call in enumerate(calls)]
        names |= {call["id"]: call["function"]["name"] for call in calls}
        results: list[Message] = []
        while index < len(messages) and messages[index]["role"] == "tool":
            results.append(_result(messages[index], names, form, calls, len(results)))
            index += 1
        if write_calls is not None and form.arguments == "content":
            content = (message["content"] or "") + write_calls(calls)
            said = {**message, "content": content}
            del said["tool_calls"]
            adapted += [said, *results]
            continue
        if len(calls) > 1 and form.several == "lost":
            raise UnsayableError(
                f"messages[{index - len(results) - 1}] has {len(calls)} calls of tools, and the "
                "model's chat template writes only one"
            )
        adapted = _after_text(adapted, message, form)
        adapted += _round(message, calls, results, form)
    return adapted


def _call(call: Mapping[str, Any], default_id: str, form: CallForm) -> Message:
    """A call in a form. One without an id gets one."""
    function, call_id = dict(call["function"]), call.get("id") or default_id
    if form.arguments == "text" and not isinstance(function.get("arguments"), str):
        function["arguments"] = json.dumps(function.get("arguments") or {}, ensure_ascii=False)
    return {**call, "id": _id(call_id, form), "function": function}


def _result(
    message: Message,
    names: Mapping[str, str],
    form: CallForm,
    calls: Sequence[Message] = (),
    number: int = 0,
) -> Message:
    """The result of a call, with the call's id and name. Without an id it belongs to the call of
    its number.
    """
    call_id = message.get("tool_call_id")
    if call_id is not None:
        call_id = _id(str(call_id), form)
    elif number < len(calls):
        call_id = calls[number]["id"]
    known = {"tool_call_id": call_id, "name": message.get("name") or names.get(call_id or "")}
    return {**message, **{name: value for name, value in known.items() if value is not None}}


def _id(call_id: str, form: CallForm) -> str:
    if not form.has_short_ids or _SHORT_ID.fullmatch(call_id):
        return call_id
    return hashlib.blake2b(call_id.encode(errors="replace")).hexdigest()[:9]


def _after_text(before: list[Message], message: Message, form: CallForm) -> list[Message]:
    """The messages before calls, with the text beside them where it has to be elsewhere."""
    text = message["content"]
    if not text or form.text == "beside":
        return before
    if form.text == "apart" or not before:
        return [*before, {key: each for key, each in message.items() if key != "tool_calls"}]
    content = _SEPARATOR.join(filter(None, (before[-1]["content"], _REMARK.format(text))))
    return [*before[:-1], {**before[-1], "content": content}]


def _round(
    message: Message, calls: Sequence[Message], results: Sequence[Message], form: CallForm
) -> list[Message]:
    """The messages of an answer with calls, and of their results."""
    bare: Message = {"role": message["role"], "content": form.content}
    if form.text == "beside":
        bare = {**message, "content": message["content"] or form.content}
    elif form.text == "before":
        bare = {**message, "content": form.content}
    if len(calls) == 1 or form.several == "beside":
        return [{**bare, "tool_calls": list(calls)}, *results]
    rounds: list[Message] = []
    for call in calls:
        rounds.append({**bare, "tool_calls": [call]})
        rounds += [each for each in results if each.get("tool_call_id") == call["id"]]
        bare = {"role": message["role"], "content": form.content}
    ids = {call["id"] for call in calls}
    return [*rounds, *(each for each in results if each.get("tool_call_id") not in ids)]


def _with_system(
    messages: Sequence[Message], place: Literal["anywhere", "first", "nowhere"]
) -> list[Message]:
    """The messages with those of the system where a template takes them: later ones become
    reminders of the user, and the first ones one message or the beginning of the first question.
    """
    if place == "anywhere":
        return list(messages)
    texts: list[str] = []
    rest = list(messages)
    while rest and rest[0]["role"] == "system":
        texts.append(rest.pop(0)["content"])
    rest = [
        {"role": "user", "content": REMINDER.format(message["content"])}
        if message["role"] == "system"
        else message
        for message in rest
    ]
    if not texts:
        return rest
    text = _SEPARATOR.join(texts)
    if place == "first":
        return [{**messages[0], "content": text}, *rest]
    if rest and rest[0]["role"] == "user":
        return [{**rest[0], "content": text + _SEPARATOR + rest[0]["content"]}, *rest[1:]]
    return [{"role": "user", "content": text}, *rest]


def _merged(messages: Sequence[Message], repeats: frozenset[str]) -> list[Message]:
    """The messages in which those of a role that may not speak twice in turn are joined."""
    merged: list[Message] = []
    for message in messages:
        last = merged[-1] if merged else None
        role = message["role"]
        if (
            last is None
            or role not in ("user", "assistant")
            or role in repeats
            or last["role"] != role
            or last.get("tool_calls")
        ):
            merged.append(message)
            continue
        contents = filter(None, (last["content"], message["content"]))
        merged[-1] = {**last, **message, "content": _SEPARATOR.join(contents)}
    return merged


def calls_as_text(form: CallFormat | None) -> WriteCalls | None:
    """What writes calls as a model does, for the content of a message; ``None`` unless the format
    is JSON objects or Python's calls between marks, as that of Granite 3 and LFM2, whose templates
    write no calls.
    """
    if form is None or not form.start or form.shape not in ("json", "python"):
        return None
    write = _as_json if form.shape == "json" else _as_python
    start, end, is_apart = form.start, form.end, form.shape == "json" and form.end

    def write_calls(calls: Sequence[Message]) -> str:
        written = [write(call["function"]) for call in calls]
        if is_apart:
            return "\n".join(f"{start}\n{each}\n{end}" for each in written)
        return f"{start}[{', '.join(written)}]{end}"

    return write_calls


def _as_json(function: Mapping[str, Any]) -> str:
    called = {"name": function["name"], "arguments": function.get("arguments") or {}}
    return json.dumps(called, ensure_ascii=False)


def _as_python(function: Mapping[str, Any]) -> str:
    arguments = [
        f"{name}={json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)}"
        for name, value in (function.get("arguments") or {}).items()
    ]
    return f"{function['name']}({', '.join(arguments)})"


# --- Finding out ---

# Renders messages with these variables of the template. It may raise anything.
Render: TypeAlias = "Callable[[Sequence[Message], Mapping[str, Any]], object]"


def find_traits(render: Render) -> TemplateTraits:
    """Find out what a template takes. One that can't write a single question is taken to take
    everything: its own error is the clearest one.
    """
    trial = _Trial(render, {})
    if not trial.shows([_QUESTION]):
        trial = _Trial(render, {"tools": [_TOOL]})  # The template may be for questions with tools.
    if not trial.shows([_QUESTION]):
        return TemplateTraits()
    answer, system = _said("assistant", "answer"), _said("system", "system")
    twice = {
        "user": [_QUESTION, _said("user", "again"), answer, _LAST],
        "assistant": [_QUESTION, answer, _said("assistant", "again"), _LAST],
    }
    place: Literal["anywhere", "first", "nowhere"] = "nowhere"
    if trial.shows([system, _QUESTION]):
        later = [_QUESTION, answer, system, _LAST]
        is_anywhere = trial.shows([system, _said("system", "again"), _QUESTION])
        place = "anywhere" if is_anywhere and trial.shows(later) else "first"
    return TemplateTraits(
        trial.shows([_QUESTION], _TOOL_WORDS, has_tools=True),
        place,
        frozenset(role for role, messages in twice.items() if trial.shows(messages)),
        _call_form(trial),
    )


@lru_cache(maxsize=8)
def _traits_of(tokenizer: TokenizerWrapper, template: str) -> TemplateTraits:
    def render(messages: Sequence[Message], options: Mapping[str, Any]) -> object:
        options = {"add_generation_prompt": True, **options}
        return tokenizer.apply_chat_template(list(messages), tokenize=False, **options)

    return find_traits(render)


def _word(text: str) -> str:
    """A word that no template has."""
    return f"zq{text}qz"


def _said(role: str, text: str) -> Message:
    return {"role": role, "content": _word(text)}


_QUESTION, _LAST = _said("user", "question"), _said("user", "last")
_TOOL_WORDS = list(map(_word, ("name", "description", "parameter")))
_TOOL = {
    "type": "function",
    "function": {
        "name": _TOOL_WORDS[0],
        "description": _TOOL_WORDS[1],
        "parameters": {
            "type": "object",
            "properties": {_TOOL_WORDS[2]: {"type": "string", "description": "text"}},
            "required": [_TOOL_WORDS[2]],
        },
    },
}


class _Trial:
    """Renders small conversations."""

    def __init__(self, render: Render, options: Mapping[str, Any]):
        self._render = render
        self._options = options

    def text_of(self, messages: Sequence[Message], has_tools: bool) -> str:
        """What the template writes; empty if it raises."""
        try:
            text = self._render(messages, {"tools": [_TOOL]} if has_tools else self._options)
        except Exception:  # A template is a program, and may raise anything.
            return ""
        return text if isinstance(text, str) else ""

    def shows(
        self,
        messages: Sequence[Message],
        words: Sequence[str] = (),
        has_tools: bool = False,
    ) -> bool:
        """Whether the template writes all these words, or the contents of all messages."""
        text = self.text_of(messages, has_tools)
        return all(word in text for word in words or [each["content"] for each in messages])

    def shows_calls(self, form: CallForm, num_calls: int = 1, text: str = "") -> bool:
        """Whether calls, their arguments and their results are written in a form."""
        kinds = ("name", "argument", "result")
        words = [_word(f"{kind}{number}") for number in range(num_calls) for kind in kinds]
        messages = _with_calls(_calling(num_calls, text), form)
        return self.shows(messages, [*words, text, _word("last")], has_tools=True)

    def writes_arguments(self, form: CallForm) -> bool:
        """Whether arguments are neither written as Python writes a dict, nor as JSON in JSON."""
        text = self.text_of(_with_calls(_calling(1, ""), form), has_tools=True)
        argument = _word("argument0")
        return f"'{argument}'" not in text and f'\\"{argument}' not in text


def _calling(num_calls: int, text: str) -> list[Message]:
    """A conversation with an answer that calls tools."""
    numbers = range(num_calls)
    calls = [
        {
            "type": "function",
            "id": f"call_{number}",
            "function": {
                "name": _word(f"name{number}"),
                "arguments": {"text": _word(f"argument{number}")},
            },
        }
        for number in numbers
    ]
    results = [
        _said("tool", f"result{number}") | {"tool_call_id": f"call_{number}"} for number in numbers
    ]
    answer = {"role": "assistant", "content": text, "tool_calls": calls}
    return [_QUESTION, answer, *results, _said("assistant", "answer"), _LAST]


def _call_form(trial: _Trial) -> CallForm | None:
    """The first form in which a template writes calls; ``None`` if there is none."""
    shown = [
        form
        for has_short_ids, content, arguments in product(
            (False, True), ("", None), ("object", "text")
        )
        if trial.shows_calls(
            form := CallForm(arguments, content, has_short_ids=has_short_ids)  # type: ignore[arg-type]
        )
    ]
    if not shown:
        as_text = [_QUESTION, _said("assistant", "answer"), _said("tool", "result"), _LAST]
        return CallForm("content") if trial.shows(as_text) else None
    form = next(filter(trial.writes_arguments, shown), shown[0])
    several = [replace(form, several="beside"), replace(form, several="apart")]
    form = next(
        (each for each in several if trial.shows_calls(each, 2)), replace(form, several="lost")
    )
    apart = [replace(form, text="beside"), replace(form, text="apart")]
    return next(
        (each for each in apart if trial.shows_calls(each, text=_word("text"))),
        replace(form, text="before"),
    )
