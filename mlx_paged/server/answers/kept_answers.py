"""``KeptAnswers``: what was answered lately, so that a conversation that comes back begins with the
tokens that were generated, and is found in the cache.

Clients send an answer back as it was told to them: without its reasoning, where their protocol has
no place for it, and with its calls as JSON. The template then writes other text than the model did,
or the same text as other tokens, and the cache misses from there on. So each answer is kept, under
the conversation that it ends. When it comes back, its reasoning is given to the template, which may
write it or leave it out; and where the text that the template writes says what was generated, the
prompt goes on with the generated tokens.
"""

from __future__ import annotations

import hashlib
import json
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged.chat_template import encode_text, normalise_messages, render_chat
from mlx_paged.request import CompletionOutput
from mlx_paged.server.answers.reader import AnswerFormat, Reading, read_answer

# Of answers and of what stands between them; about 40 MB with the text of the reasoning.
MAX_KEPT_TOKENS = 4_000_000
_NUM_CONTEXT_TOKENS = 4  # how an answer's first token is written may depend on those before it


@dataclass(frozen=True)
class KeptAnswer:
    """An answer, and the prompt that it answers.

    Args:
        reading: what it says.
        num_characters: of its prompt, as the template wrote it.
        digest: of these.
        before: the answer that the prompt goes on from.
        token_ids: those of prompt and answer that follow ``before``, without the end of sequence.
        num_tokens: of the whole prompt and the answer.
    """

    reading: Reading
    num_characters: int
    digest: bytes
    before: KeptAnswer | None
    token_ids: array[int]
    num_tokens: int

    def all_token_ids(self) -> list[int]:
        """Of the prompt and the answer."""
        parts = []
        answer: KeptAnswer | None = self
        while answer is not None:
            parts.append(answer.token_ids)
            answer = answer.before
        return [token for part in reversed(parts) for token in part]


@dataclass(frozen=True)
class Prompt:
    """A conversation as a prompt.

    Args:
        text: as the template wrote it.
        token_ids: of the prompt, which may be those of a text that says the same.
        before: the kept answer that it goes on from.
        key: names the conversation.
    """

    text: str
    token_ids: list[int]
    before: KeptAnswer | None
    key: bytes


class KeptAnswers:
    """The last answers. Any thread may use it.

    Args:
        max_tokens: that are kept; the answers that nobody came back to for longest go first.

    Attributes:
        num_tokens: that are kept. Those of a conversation count once.
    """

    def __init__(self, max_tokens: int = MAX_KEPT_TOKENS):
        self.max_tokens = max_tokens
        self._answers: OrderedDict[bytes, KeptAnswer] = OrderedDict()
        self.num_tokens = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._answers)

    def encode(
        self,
        tokenizer: TokenizerWrapper,
        messages: Sequence[Mapping[str, Any]],
        template_options: Mapping[str, Any],
        cache_salt: str | None = None,
        check_length: Callable[[str, int], None] = lambda text, num_tokens: None,
    ) -> Prompt:
        """The prompt that a conversation makes, from the generated tokens as far as they are known.

        Args:
            messages, template_options: as :func:`render_chat`. ``reasoning_content`` of an
                assistant's message is what the client says, also if that is nothing (``""``).
            cache_salt: answers of other salts are never used.
            check_length: called before a text is encoded, with the number of tokens before it;
                raises if it is too long.

        Raises:
            ChatTemplateError: as :func:`encode_chat`.
        """
        normal = normalise_messages(messages)
        keys = _keys(normal, cache_salt)
        kept = [
            (message, answer)
            for message, key in zip(normal, keys, strict=True)
            if message["role"] == "assistant" and (answer := self._get(key)) is not None
        ]
        for message, answer in kept:
            if message.get("reasoning_content") is None and answer.reading.reasoning:
                message["reasoning_content"] = answer.reading.reasoning
        for message in normal:
            if message.get("reasoning_content"):
                message["reasoning"] = message["reasoning_content"]  # as other templates call it
        text = render_chat(tokenizer, normal, template_options)
        tools = template_options.get("tools") or ()
        for _, answer in reversed(kept):
            end = _end_of(answer, text, tokenizer, tools)
            if end is not None:
                token_ids = answer.all_token_ids()
                check_length(text[end:], len(token_ids))
                token_ids += encode_text(tokenizer, text[end:])
                return Prompt(text, token_ids, answer, keys[-1])
        check_length(text, 0)
        return Prompt(text, encode_text(tokenizer, text), None, keys[-1])

    def keep(
        self,
        tokenizer: TokenizerWrapper,
        prompt: Prompt,
        answer_format: AnswerFormat,
        completion: CompletionOutput,
    ) -> None:
        """Keep the answer to a prompt, if it is one that can come back.

        Args:
            completion: with all of its tokens.
        """
        has_ended = completion.finish_reason in ("stop", "length")
        if not has_ended or isinstance(completion.stop_reason, str):
            return  # A stop text ends an answer elsewhere than its tokens do.
        token_ids = list(completion.token_ids)
        if token_ids and token_ids[-1] in tokenizer.eos_token_ids:
            token_ids.pop()
        text = _decoded(tokenizer, prompt.token_ids[-_NUM_CONTEXT_TOKENS:], token_ids)
        # With calls that were left out, too: what was told does not say all of these tokens then.
        reading = read_answer(replace(answer_format, max_calls=None), text, completion)
        message = _message_of(reading)
        if message is None:
            return
        num_before = 0 if prompt.before is None else prompt.before.num_tokens
        answer = KeptAnswer(
            reading,
            len(prompt.text),
            _digest(prompt.text),
            prompt.before,
            array("i", prompt.token_ids[num_before:] + token_ids),
            len(prompt.token_ids) + len(token_ids),
        )
        self._put(_next_key(prompt.key, message), answer)

    def _get(self, key: bytes) -> KeptAnswer | None:
        with self._lock:
            answer = self._answers.get(key)
            if answer is not None:
                self._answers.move_to_end(key)
            return answer

    def _put(self, key: bytes, answer: KeptAnswer) -> None:
        with self._lock:
            replaced = self._answers.pop(key, None)
            if replaced is not None:
                self.num_tokens -= len(replaced.token_ids)
            self._answers[key] = answer
            self.num_tokens += len(answer.token_ids)
            while self.num_tokens > self.max_tokens:
                _, oldest = self._answers.popitem(last=False)
                self.num_tokens -= len(oldest.token_ids)


def _keys(messages: Sequence[Mapping[str, Any]], cache_salt: str | None) -> list[bytes]:
    """For each message, what names the conversation up to it: what everybody said, but no
    reasoning.
    """
    key = hashlib.blake2b(_json(cache_salt)).digest()
    keys = []
    for message in messages:
        key = _next_key(key, message)
        keys.append(key)
    return keys


def _next_key(key: bytes, message: Mapping[str, Any]) -> bytes:
    said = {
        name: value
        for name, value in message.items()
        if name not in ("reasoning", "reasoning_content", "tool_calls", "tool_call_id")
    }
    if message["role"] == "assistant":
        # Space around it may have been a mark's, or the client's.
        said["content"] = message["content"].strip()
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    said["calls"] = [(call["name"], _plain(call.get("arguments"))) for call in calls]
    return hashlib.blake2b(key + _json(said)).digest()


def _message_of(reading: Reading) -> dict[str, Any] | None:
    """The message in which an answer comes back; ``None`` if it can't come back as it is."""
    try:
        calls = [
            {"function": {"name": name, "arguments": json.loads(arguments)}}
            for name, arguments in reading.calls
        ]
    except (ValueError, RecursionError):
        return None
    if not calls and not reading.text.strip():
        return None
    return {"role": "assistant", "content": reading.text, "tool_calls": calls}


def _end_of(
    answer: KeptAnswer, text: str, tokenizer: TokenizerWrapper, tools: Sequence[dict[str, Any]]
) -> int | None:
    """Where an answer ends in the text of a conversation; ``None`` if the template writes another
    prompt than it did then, or an answer that says something else.
    """
    begin = answer.num_characters
    if begin > len(text) or _digest(text[:begin]) != answer.digest:
        return None
    names = tokenizer.convert_ids_to_tokens(sorted(tokenizer.eos_token_ids))
    ends = [place for name in names if name and (place := text.find(name, begin)) >= 0]
    if not ends:
        return None
    answer_format = AnswerFormat.of(tokenizer, text[:begin], tools)
    written = read_answer(answer_format, text[begin : min(ends)])
    return min(ends) if _says(written) == _says(answer.reading) else None


def _says(reading: Reading) -> object:
    message = _message_of(reading)
    return reading.reasoning.strip(), message and _next_key(b"", message)


def _decoded(tokenizer: TokenizerWrapper, context: Sequence[int], token_ids: Sequence[int]) -> str:
    """The text of tokens that follow others."""
    before, whole = (
        tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        for ids in (context, [*context, *token_ids])
    )
    return str(whole[len(before) :])


def _plain(value: Any) -> Any:
    """A JSON value as it is after a way through JavaScript, which writes 1.0 as 1."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, default=repr).encode()


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(errors="surrogatepass")).digest()
