"""Messages to the text and the tokens of a prompt, as the model's chat template writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mlx_paged.answers.dialect import Dialect
from mlx_paged.answers.template_traits import TemplateTraits, UnsayableError, calls_as_text
from mlx_paged.errors import ChatTemplateError, one_line, reason, shown
from mlx_paged.options.argument_values import is_sequence, kind_of

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

NO_TOOLS = (
    "the model's chat template does not show tools to the model; leave them out, or load a model "
    "or template that takes tools"
)
_PROBE = "<query>"
NO_TEMPLATE = "[chat] the model's tokenizer has no chat template; use generate for plain text"


def render_chat(
    tokenizer: TokenizerWrapper,
    messages: Sequence[Mapping[str, Any]],
    template_options: Mapping[str, Any],
) -> str:
    """The conversation as the model's chat template writes it.

    Args:
        tokenizer: with a chat template.
        messages: at least one; :func:`normalise_messages` describes their form.
        template_options: variables of the template, such as ``enable_thinking`` or ``tools``.
            ``add_generation_prompt``, which is true by default, ends the text with the beginning
            of the assistant's turn.

    Messages that the template would refuse or leave out are merged, moved or put into another form
    (:class:`TemplateTraits`).

    Raises:
        ChatTemplateError: the tokenizer has no chat template, a message has a wrong form, the
            template can't write a message or the tools, or raises anything (``raise_exception``
            too).
    """
    if not tokenizer.has_chat_template:
        raise ChatTemplateError(NO_TEMPLATE)
    normal = normalise_messages(messages)
    if template_options.get("chat_template") is None:
        normal = _adapted(tokenizer, normal, bool(template_options.get("tools")))
    from jinja2.exceptions import TemplateError

    options = {"add_generation_prompt": True, **template_options}
    try:
        text = tokenizer.apply_chat_template(normal, tokenize=False, **options)
    except Exception as error:
        # A template is a program, and may raise anything. ``raise_exception`` raises the base class
        # itself.
        what = f"fails: {reason(error)}"
        if type(error) is TemplateError:
            what = f"refuses the messages: {one_line(error)}"
        raise ChatTemplateError(f"[chat template] the model's chat template {what}") from error
    if not isinstance(text, str):
        raise ChatTemplateError(
            f"[chat template] the model's chat template returned {kind_of(text)} instead of text"
        )
    return text


def render_after_prefix(
    tokenizer: TokenizerWrapper,
    messages: Sequence[Mapping[str, Any]],
    template_options: Mapping[str, Any],
) -> str:
    """The conversation as the chat template writes it, from the text of the first user message on.
    As in mlx-lm, the prompt cache holds what the template writes before that.

    Raises:
        ChatTemplateError: the template rejects the messages, or alters their text.
    """
    text = render_chat(tokenizer, messages, template_options)
    first = next(index for index, each in enumerate(messages) if each["role"] == "user")
    probe = [*messages]
    probe[first] = {**probe[first], "content": _PROBE}
    begin = render_chat(tokenizer, probe, template_options).find(_PROBE)
    if begin < 0:
        raise ChatTemplateError(
            "[chat template] the model's chat template alters the text of messages, so the "
            "conversation can't continue a prompt cache; leave --prompt-cache-file out"
        )
    return text[begin:]


def _adapted(
    tokenizer: TokenizerWrapper, messages: list[dict[str, Any]], has_tools: bool
) -> list[dict[str, Any]]:
    """The messages in the form that the template takes."""
    traits = TemplateTraits.of(tokenizer)
    if has_tools and not traits.shows_tools:
        raise ChatTemplateError(f"[chat template] {NO_TOOLS}", "tools")
    try:
        return traits.adapt(messages, calls_as_text(Dialect.of(tokenizer).calls))
    except UnsayableError as error:
        raise ChatTemplateError(f"[chat template] {error}") from error


def encode_chat(
    tokenizer: TokenizerWrapper,
    messages: Sequence[Mapping[str, Any]],
    template_options: Mapping[str, Any],
) -> tuple[str, list[int]]:
    """The text of a conversation, as :func:`render_chat` writes it, and its token ids.

    Raises:
        ChatTemplateError: as :func:`render_chat`, or the tokenizer can't encode the text.
    """
    text = render_chat(tokenizer, messages, template_options)
    return text, encode_text(tokenizer, text)


def encode_text(tokenizer: TokenizerWrapper, text: str) -> list[int]:
    """The token ids of a text that a chat template wrote, or of a piece of one.

    Raises:
        ChatTemplateError: the tokenizer can't encode it.
    """
    try:
        # The template writes the special tokens, so the tokenizer adds none.
        return list(tokenizer.encode(text, add_special_tokens=False))
    except Exception as error:  # A tokenizer may raise anything.
        raise ChatTemplateError(
            f"[chat] the tokenizer can't encode the conversation: {reason(error)}"
        ) from error


def normalise_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies of the messages whose content is text.

    Each message is a mapping with a ``role``, a non-empty string, and a ``content``: a string, or a
    list of parts (strings, or ``{"type": "text", "text": ...}``), whose texts are joined without
    anything between them, as mlx-lm does. A message with ``tool_calls`` may do without content, or
    have ``None``, which is the empty text. Other keys are left alone for the template.

    Raises:
        ChatTemplateError: a message has another form; the error gives the index of the first.
    """
    if not is_sequence(messages):
        raise ChatTemplateError(
            f"[chat] messages must be a list of messages, got {kind_of(messages)}"
        )
    if not messages:
        raise ChatTemplateError("[chat] messages is empty; give at least one message")
    return [
        _normalise_message(message, f"messages[{index}]") for index, message in enumerate(messages)
    ]


def _normalise_message(message: Mapping[str, Any], name: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ChatTemplateError(
            f"[chat] {name} must be a mapping with a role and a content, got {kind_of(message)}"
        )
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ChatTemplateError(
            f"[chat] the role of {name} must be a text such as 'user', got {shown(role)}"
        )
    return {**message, "role": role, "content": _content_text(message, name)}


def _content_text(message: Mapping[str, Any], name: str) -> str:
    if message.get("content") is None and message.get("tool_calls"):
        return ""
    if "content" not in message:
        raise ChatTemplateError(f"[chat] {name} has no content")
    content = message["content"]
    if isinstance(content, str):
        return _encodable(content, f"the content of {name}")
    if not isinstance(content, list | tuple):
        raise ChatTemplateError(
            f"[chat] the content of {name} must be a text or a list of text parts, got "
            f"{shown(content)}"
        )
    return "".join(
        _part_text(part, f"part {index} of {name}") for index, part in enumerate(content)
    )


def _part_text(part: object, name: str) -> str:
    if isinstance(part, str):
        return _encodable(part, name)
    if not isinstance(part, Mapping):
        raise ChatTemplateError(f"[chat] {name} must be a text part, got {shown(part)}")
    kind = part.get("type")
    if kind != "text":
        raise ChatTemplateError(
            f"[chat] {name} is of type {shown(kind)}; only parts of type 'text' are supported"
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise ChatTemplateError(f"[chat] the text of {name} must be a text, got {shown(text)}")
    return _encodable(text, name)


def _encodable(text: str, name: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        # The tokenizer's error would name neither the message nor the character.
        raise ChatTemplateError(
            f"[chat] {name} has a lone surrogate at character {error.start}, which is not text"
        ) from error
    return text
