"""A conversation with an engine, in which each turn reuses the K/V of the turns before it."""

from __future__ import annotations

import copy
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TypeAlias

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged.answers.chat_template import (
    NO_TEMPLATE,
    normalise_messages,
    render_after_prefix,
    render_chat,
)
from mlx_paged.answers.conversation_encoder import ConversationEncoder, Prompt, Verbatim, decoded
from mlx_paged.answers.dialect import PLAIN, AnswerFormat
from mlx_paged.engine.engine import Engine
from mlx_paged.errors import ChatTemplateError
from mlx_paged.generation import GenerationResponse, Progress, stream_request
from mlx_paged.options.sampling_params import SamplingParams

Messages: TypeAlias = list[dict[str, Any]]


class Conversation:
    """Messages, and the engine that answers them and keeps their K/V.

    The prompt of a turn is the whole conversation as the model's chat template writes it. The part
    that was computed before is reused. Where a template rewrites earlier turns (Qwen3's drops their
    reasoning), only the text from there on is computed again.

    Args:
        engine: answers the turns, and finds what it computed before in its prefix cache. Several
            conversations may share it, if their turns don't overlap.
        tokenizer: with a chat template.
        system_prompt: the first message, if any.
        template_options: variables of the template, such as ``enable_thinking``.
        prefix: a cached prompt that the conversation continues, in place of what the template
            writes before the first message of the user, so there is no system prompt.

    Attributes:
        messages: mappings as :func:`normalise_messages` describes them. The list is replaced, not
            changed, and so is that of the tokens: branches may share them.
        tokens: of the last prompt and its answer, as far as their K/V are computed.
        answer_format: how the answer to the prompt of the last turn is read.

    Raises:
        ChatTemplateError: the tokenizer has no chat template.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: TokenizerWrapper,
        system_prompt: str | None = None,
        template_options: Mapping[str, Any] | None = None,
        prefix: Sequence[int] = (),
    ):
        if not tokenizer.has_chat_template:
            raise ChatTemplateError(NO_TEMPLATE)
        self.engine = engine
        self.tokens: list[int] = []
        self.tokenizer = tokenizer
        self.answer_format = PLAIN
        self._prefix = prefix
        self._encoder = ConversationEncoder()
        self._template_options = template_options or {}
        self.messages = _system_message(system_prompt)

    @property
    def system_prompt(self) -> str | None:
        """The content of the first message, if it is a system message."""
        first = self.messages[0] if self.messages else {"role": "user"}
        return first["content"] if first["role"] == "system" else None

    def set_system_prompt(self, text: str | None) -> None:
        """Replace or remove the system prompt; the next turn recomputes the conversation.

        Raises:
            ChatTemplateError: the template rejects it; nothing has changed.
        """
        turns = self.messages[self.system_prompt is not None :]
        self._replace_messages([*_system_message(text), *turns])

    def load_messages(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Replace the conversation by these messages.

        Raises:
            ChatTemplateError: they are not messages, or the template rejects them; nothing has
                changed.
        """
        self._replace_messages(normalise_messages(messages))

    def load_kv(self, path: str | Path) -> int:
        """Load the K/V of the conversation whose messages were loaded; returns their number of
        tokens. The next turn reuses the longest prefix that its prompt has in common with them.

        Raises:
            SnapshotError: the file holds K/V of another model or of other settings, was altered, or
                can't be read.
            CacheFullError: they do not fit into the budget.
        """
        self.tokens = self.engine.load_snapshot(path)
        if self.messages:
            rest = self.tokens[len(self._prefix) :]
            self._encoder.keep_tokens(self.tokenizer, self.messages, rest)
        return len(self.tokens)

    def reset(self) -> None:
        """Remove all turns but the system prompt."""
        self.messages = self.messages[: self.system_prompt is not None]
        self.tokens = []

    def fork(self) -> Conversation:
        """A branch: a second conversation that continues from here and shares the K/V of all turns
        so far. With ``kv="basic"`` the next one to be asked takes the K/V over, and the other one
        reuses their common prefix.
        """
        return copy.copy(self)

    @property
    def last_turn(self) -> tuple[Messages, str] | None:
        """The messages before the last one of the user, and its text; ``None`` before the first."""
        for at in reversed(range(len(self.messages))):
            if self.messages[at]["role"] == "user":
                return self.messages[:at], self.messages[at]["content"]
        return None

    def ask(
        self,
        text: str | Sequence[str | Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        progress: Progress | None = None,
        before: Messages | None = None,
    ) -> Generator[GenerationResponse, None, None]:
        """One turn: yield the answer piece by piece.

        An answer that is cut short (closed by the caller, or at ``max_tokens``) stays in the
        conversation. A turn that fails before its first token leaves the conversation unchanged.

        Args:
            text: the message: a text, or a list of text parts.
            params: ``max_tokens`` and how to sample; greedy by default.
            progress: called with the prompt tokens done so far and their total.
            before: the messages that it follows, in the place of all so far: those before the last
                turn, if this one replaces it.

        Raises:
            PromptTooLongError: the conversation with this turn exceeds the budget or the context
                limit.
            ChatTemplateError: the message is not text, or the template rejects the conversation.
            ValueError: an empty message.
        """
        before = self.messages if before is None else before
        messages = [*before, *normalise_messages([{"role": "user", "content": text}])]
        if not messages[-1]["content"].strip():
            raise ValueError("[chat] the message is empty")
        prompt = self.encode(messages)
        token_ids = [*self._prefix, *prompt.token_ids]
        self.answer_format = AnswerFormat.of(self.tokenizer, prompt.text)
        # Reasoning marks may be special tokens, and belong to the history.
        params = params or SamplingParams(skip_special_tokens=False)
        answer: list[GenerationResponse] = []
        try:
            with closing(stream_request(self.engine, token_ids, params, progress)) as responses:
                for response in responses:
                    answer.append(response)
                    yield response
        finally:
            if answer:
                # The K/V of the newest token are not computed yet.
                generated = [each.token for each in answer[:-1]]
                self.tokens = token_ids + generated
                message = {"role": "assistant", "content": "".join(each.text for each in answer)}
                self.messages = [*messages, message]
                said = Verbatim(decoded(self.tokenizer, prompt.token_ids, generated))
                self._encoder.keep(self.tokenizer, prompt, generated, message, said)

    def encode(self, messages: Sequence[Mapping[str, Any]]) -> Prompt:
        """Messages as a prompt, without the prefix."""
        write = render_after_prefix if self._prefix else render_chat
        return self._encoder.encode(self.tokenizer, messages, self._template_options, write=write)

    def _replace_messages(self, messages: Messages) -> None:
        if self._prefix and messages and messages[0]["role"] == "system":
            raise ValueError(
                "[chat] a system prompt can't follow a prompt cache, which already begins the "
                "conversation; make it part of the cached prompt"
            )
        # Rendering the prompt of a next turn shows whether the template accepts these roles.
        is_turn_open = bool(messages) and messages[-1]["role"] == "user"
        probe = [] if is_turn_open else [{"role": "user", "content": "?"}]
        render_chat(self.tokenizer, [*messages, *probe], self._template_options)
        self.messages = messages


def _system_message(text: str | None) -> Messages:
    return [] if text is None else [{"role": "system", "content": text}]
