"""A conversation with an engine, in which each turn reuses the K/V of the turns before it."""

from __future__ import annotations

import copy
import json
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged.answers.chat_template import (
    NO_TEMPLATE,
    ChatTemplateError,
    normalise_messages,
    render_chat,
)
from mlx_paged.answers.conversation_encoder import ConversationEncoder, Prompt, Verbatim, decoded
from mlx_paged.answers.dialect import PLAIN, AnswerFormat
from mlx_paged.engine.engine import Engine
from mlx_paged.errors import ArgumentError, shown
from mlx_paged.generation import GenerationResponse, Progress, stream_request
from mlx_paged.loading.folder import DEMO, demo_model_path
from mlx_paged.options.sampling_params import SamplingParams
from mlx_paged.snapshots import SnapshotError, check_path, is_snapshot, read_prompt_cache
from mlx_paged.snapshots.prompt_caches import MODEL, TOKEN_IDS, TOKENIZER_CONFIG

AnswerStream: TypeAlias = Generator[GenerationResponse, None, None]
_QUERY = "<query>"


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
    def last_user_text(self) -> str | None:
        """The last message of the user, ``None`` before the first."""
        index = self._last_user_index()
        return None if index is None else str(self.messages[index]["content"])

    def ask(
        self,
        text: str | Sequence[str | Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        progress: Progress | None = None,
    ) -> AnswerStream:
        """One turn: yield the answer piece by piece.

        An answer that is cut short (closed by the caller, or at ``max_tokens``) stays in the
        conversation. A turn that fails before its first token leaves the conversation unchanged.

        Args:
            text: the message: a text, or a list of text parts.
            params: ``max_tokens`` and how to sample; greedy by default.
            progress: called with the prompt tokens done so far and their total.

        Raises:
            PromptTooLongError: the conversation with this turn exceeds the budget or the context
                limit.
            ChatTemplateError: the message is not text, or the template rejects the conversation.
            ValueError: an empty message.
        """
        return self._answer(self.messages, text, params, progress)

    def ask_again(
        self,
        text: str | None = None,
        params: SamplingParams | None = None,
        *,
        progress: Progress | None = None,
    ) -> AnswerStream:
        """Repeat the last turn, as :meth:`ask`: replace its answer, and with ``text`` its message.

        Raises:
            ValueError: there is no turn yet.
            Others: see :meth:`ask`.
        """
        begin = self._last_user_index()
        if begin is None:
            raise ValueError("[chat] there is no message of the user yet")
        text = self.messages[begin]["content"] if text is None else text
        return self._answer(self.messages[:begin], text, params, progress)

    def _answer(
        self,
        before: Sequence[Mapping[str, Any]],
        text: str | Sequence[str | Mapping[str, Any]],
        params: SamplingParams | None,
        progress: Progress | None,
    ) -> AnswerStream:
        """The answer to a message after the messages ``before``."""
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
        write, options = after_prefix if self._prefix else render_chat, self._template_options
        return self._encoder.encode(self.tokenizer, messages, options, write=write)

    def _last_user_index(self) -> int | None:
        each = enumerate(self.messages)
        return max((at for at, message in each if message["role"] == "user"), default=None)

    def _replace_messages(self, messages: list[dict[str, Any]]) -> None:
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


def _system_message(text: str | None) -> list[dict[str, Any]]:
    return [] if text is None else [{"role": "system", "content": text}]


# --prompt-cache-file: a snapshot, or a prompt cache of mlx-lm's with token ids. It replaces what
# the chat template writes before the first message of the user.


class PromptCacheFacts(NamedTuple):
    """The metadata of a prompt cache file, which is read before a model is loaded."""

    path: Path
    model: str | None = None  # as it was given to mlx-lm
    tokenizer_config: Mapping[str, Any] = {}


def read_facts(path: str) -> PromptCacheFacts:
    """Raises ``SnapshotError`` unless the file is a snapshot, or a prompt cache of mlx-lm's with
    token ids.
    """
    file = check_path(path)
    if is_snapshot(file):
        return PromptCacheFacts(file)
    _, metadata = read_prompt_cache(file)
    if TOKEN_IDS not in metadata:
        raise SnapshotError(
            file,
            "does not contain the ids of its tokens, like all prompt caches that mlx-lm makes; "
            "give its text as the first message, and --cache-dir to keep the K/V",
        )
    try:
        config = json.loads(metadata.get(TOKENIZER_CONFIG, "{}"))
        if not isinstance(config, dict):
            raise ValueError(f"{shown(config)} is not a mapping")
    except (ValueError, RecursionError) as error:
        raise SnapshotError(file, f"has a tokenizer_config that can't be read: {error}") from error
    # A file must not be able to allow the execution of code.
    config = {name: value for name, value in config.items() if name != "trust_remote_code"}
    return PromptCacheFacts(file, metadata.get(MODEL) or None, config)


def chosen_model(facts: PromptCacheFacts, model: str | None, allow_other_model: bool) -> str | None:
    """The model to load, which the file or ``--model`` names.

    Args:
        allow_other_model: whether they may name different ones.

    Raises:
        ArgumentError: they name different models, and may not.
    """
    # A file that this package exported may have only the folder's name, as for the bundled model.
    named = DEMO if facts.model == demo_model_path().name else facts.model
    if model is None or facts.model is None or allow_other_model:
        return model or named
    if model == named or facts.model == Path(model).name:
        return model
    folders = [Path(name).expanduser() for name in (model, facts.model)]
    if all(folder.exists() for folder in folders) and folders[0].samefile(folders[1]):
        return model
    raise ArgumentError(
        f"[chat] --prompt-cache-file {facts.path} was made with the model {facts.model}, and "
        f"--model is {model}; leave --model out, create the file again, or use "
        "--allow-other-model if they are the same",
        "model",
    )


def load_prefix(engine: Engine, facts: PromptCacheFacts) -> list[int]:
    """Load the K/V of a file into an engine; returns their token ids.

    Raises:
        SnapshotError: it holds K/V of another model, dtype or format, or was altered.
        ArgumentError: the engine has no blocks, or a ``window``, which mlx-lm does not have.
        CacheFullError: they do not fit into the budget.
    """
    if is_snapshot(facts.path):
        return engine.load_snapshot(facts.path)
    # The model was chosen by the file (chosen_model).
    return engine.import_prompt_cache(facts.path, allow_other_model=True)


def after_prefix(
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
    probe[first] = {**probe[first], "content": _QUERY}
    begin = render_chat(tokenizer, probe, template_options).find(_QUERY)
    if begin < 0:
        raise ChatTemplateError(
            "[chat template] the model's chat template alters the text of messages, so the "
            "conversation can't continue a prompt cache; leave --prompt-cache-file out"
        )
    return text[begin:]
