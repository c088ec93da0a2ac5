"""``ConversationEncoder``: encodes conversations such that one that continues begins with the
tokens that were generated, and hits the prefix cache.

A client returns an answer as text, possibly without its reasoning, and with its tool calls as JSON.
The template then writes a different text than the model did, or the same text encodes to different
tokens, and the cache misses from there on. So each answer is kept under the conversation that it
ends. When it comes back, its reasoning is passed to the template, which may write it or leave it
out; and if the text that the template writes says what was generated, the prompt continues with the
generated tokens.

With a ``cache_dir``, answers are also stored beside the blocks, so that conversations continue
after a restart, and in other processes.
"""

from __future__ import annotations

import hashlib
import json
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from mlx_paged.answers.chat_template import encode_text, normalise_messages, render_chat
from mlx_paged.answers.dialect import AnswerFormat, Dialect
from mlx_paged.answers.reader import Reading, read_answer
from mlx_paged.core.tier import ANSWERS, BlockHeader

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

# Of prompts and answers; about 40 MB with the text of the reasoning.
MAX_KEPT_TOKENS = 4_000_000
_NUM_CONTEXT_TOKENS = 4  # the text of an answer's first token may depend on those before it
_VERSION = 1  # of stored answers


class Verbatim(NamedTuple):
    """An answer that comes back exactly as the text that was generated.

    Args:
        reasoning: comes back in a separate field or not at all.
    """

    text: str
    reasoning: str = ""

    def find_end(
        self,
        tokenizer: TokenizerWrapper,
        template_options: Mapping[str, Any],
        text: str,
        begin: int,
    ) -> int | None:
        """Where the answer ends in a text in which a template wrote it from ``begin`` on; ``None``
        if the text there says something else.
        """
        return begin + len(self.text) if text.startswith(self.text, begin) else None


class ReadAnswer(Reading):
    """An answer that is compared by its reasoning, text and calls instead of its exact text."""

    @classmethod
    def of(cls, reasoning: str, text: str, calls: Sequence[Sequence[str]]) -> ReadAnswer:
        """The answer of these JSON values; raises anything for wrong ones."""
        texts = reasoning, text, *(each for call in calls for each in call)
        if not all(isinstance(each, str) for each in texts):
            raise TypeError("an answer consists of texts")
        return cls(reasoning, text, tuple((name, arguments) for name, arguments in calls))

    def message(self) -> dict[str, Any] | None:
        """The message of the assistant in which it comes back; ``None`` if clients can't send it
        back as it is.
        """
        try:
            calls = [
                {"function": {"name": name, "arguments": json.loads(arguments)}}
                for name, arguments in self.calls
            ]
        except (ValueError, RecursionError):
            return None
        if not calls and not self.text.strip():
            return None
        return {"role": "assistant", "content": self.text, "tool_calls": calls}

    @property
    def key(self) -> bytes | None:
        """Identifies what the message says."""
        message = self.message()
        return None if message is None else _next_key(b"", message)

    def find_end(
        self,
        tokenizer: TokenizerWrapper,
        template_options: Mapping[str, Any],
        text: str,
        begin: int,
    ) -> int | None:
        """As :meth:`Verbatim.find_end`."""
        names = tokenizer.convert_ids_to_tokens(sorted(tokenizer.eos_token_ids))
        ends = [place for name in names if name and (place := text.find(name, begin)) >= 0]
        if not ends:
            return None
        tools = template_options.get("tools") or ()
        answer_format = AnswerFormat.of(tokenizer, text[:begin], tools)
        marked = answer_format.marks.encode(text[begin : min(ends)])
        written = ReadAnswer(*read_answer(answer_format, marked))
        is_same = written.reasoning.strip() == self.reasoning.strip() and written.key == self.key
        return min(ends) if is_same else None


class _TextPrefix(NamedTuple):
    """The text of a prompt, as a prefix of later texts of the template."""

    num_characters: int
    digest: bytes

    @classmethod
    def of(cls, text: str) -> _TextPrefix:
        return cls(len(text), hashlib.blake2b(text.encode(errors="surrogatepass")).digest())


@dataclass(frozen=True)
class KeptAnswer:
    """An answer with its prompt.

    Args:
        key: identifies the conversation that it ends.
        said: its content.
        beginnings: the possible texts of its prompt when the conversation continues: as the
            template wrote it, and without an empty pair of reasoning marks at its end.
        before: the kept answer that the prompt continues.
        token_ids: of prompt and answer after ``before``, without the end of sequence.
        is_private: it, or an answer before it, may not be stored.

    Attributes:
        num_tokens: of the whole prompt and the answer.
        digest: of the token ids of the whole prompt and the answer.
    """

    key: bytes
    said: Verbatim | ReadAnswer
    beginnings: tuple[_TextPrefix, ...]
    before: KeptAnswer | None
    token_ids: array[int]
    is_private: bool = False
    num_tokens: int = field(init=False)
    _hash: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        before = self.before
        num_before = 0 if before is None else before.num_tokens
        digest = hashlib.blake2b(digest_size=32) if before is None else before._hash.copy()
        digest.update(self.token_ids.tobytes())
        object.__setattr__(self, "num_tokens", num_before + len(self.token_ids))
        object.__setattr__(self, "_hash", digest)

    @property
    def digest(self) -> bytes:
        return bytes(self._hash.digest())

    def all_token_ids(self) -> list[int]:
        """The token ids of the whole prompt and the answer."""
        parts = []
        answer: KeptAnswer | None = self
        while answer is not None:
            parts.append(answer.token_ids)
            answer = answer.before
        return [token for part in reversed(parts) for token in part]

    def find_end(
        self, tokenizer: TokenizerWrapper, template_options: Mapping[str, Any], text: str
    ) -> int | None:
        """Where the answer ends in the text of a conversation; ``None`` if the template writes a
        different prompt now, or an answer that says something else.
        """
        for beginning in self.beginnings:
            place = beginning.num_characters
            if place <= len(text) and _TextPrefix.of(text[:place]) == beginning:
                end = self.said.find_end(tokenizer, template_options, text, place)
                if end is not None:
                    return end
        return None


@dataclass(frozen=True)
class Prompt:
    """A conversation as a prompt.

    Args:
        text: as the template wrote it.
        token_ids: of the prompt, or of an equivalent text.
        before: the kept answer that it continues.
        key: identifies the conversation.
        answers: the kept answers in it, in order.
    """

    text: str
    token_ids: list[int]
    before: KeptAnswer | None
    key: bytes
    answers: tuple[KeptAnswer, ...] = ()


class AnswerTier(Protocol):
    """Stores bytes beyond this process, by keys. Any thread may call it."""

    def has_answer(self, key: bytes) -> bool: ...

    def load_answer(self, key: bytes) -> bytes | None: ...

    def keep_answer(self, header: BlockHeader, content: bytes) -> None: ...

    def note_answers_used(self, keys: Sequence[bytes]) -> None: ...


class StoredAnswers:
    """Kept answers as blocks of a tier, in the group :data:`ANSWERS`. Any thread may call it.

    The key of a block is a hash of the conversation, with its salt, and of the vocabulary. A block
    holds the tokens after the answer before it, which is its parent: so a conversation of many
    turns is stored once, and evicted from its end. What can't be read is a miss.

    Args:
        tier: keeps them.
        tokenizer: of the model.
    """

    def __init__(self, tier: AnswerTier, tokenizer: TokenizerWrapper):
        self._tier = tier
        self._vocabulary = _digest_of_vocabulary(tokenizer)

    def keep(self, answer: KeptAnswer, replaced: KeptAnswer | None) -> None:
        """Store an answer, unless it is private.

        Args:
            replaced: the last answer to the same conversation.
        """
        name, before = self._name_of(answer.key), answer.before
        is_known = replaced is not None and replaced.digest == answer.digest
        if answer.is_private or (is_known and self._tier.has_answer(name)):
            return
        token_ids = answer.token_ids
        if before is not None and not self._tier.has_answer(self._name_of(before.key)):
            # It was dropped or evicted.
            before, token_ids = None, array("i", answer.all_token_ids())
        first = answer.num_tokens - len(token_ids)
        parent = None if before is None else self._name_of(before.key)
        content = {
            "version": _VERSION,
            "said": answer.said,
            "beginnings": [(each.num_characters, each.digest.hex()) for each in answer.beginnings],
            "before": None if before is None else before.digest.hex(),
            "digest": answer.digest.hex(),
        }
        text = json.dumps(content).encode()
        header = BlockHeader(name, parent, tuple(token_ids), first, ANSWERS)
        self._tier.keep_answer(header, text + b"\n" + token_ids.tobytes())

    def load(self, key: bytes, earlier: Sequence[KeptAnswer]) -> KeptAnswer | None:
        """The answer that ends a conversation; ``None`` if it is not stored.

        Args:
            earlier: the answers before it in the conversation.
        """
        content = self._tier.load_answer(self._name_of(key))
        if content is None:
            return None
        try:
            return self._read(key, bytes(content), earlier)
        except Exception:  # Anything may be in a file, although checksums tell most damage.
            return None

    def note_used(self, answers: Sequence[KeptAnswer]) -> None:
        """Record the use of answers of one conversation, in order."""
        if answers:
            self._tier.note_answers_used([self._name_of(each.key) for each in answers])

    def _read(self, key: bytes, content: bytes, earlier: Sequence[KeptAnswer]) -> KeptAnswer | None:
        text, _, tokens = content.partition(b"\n")
        told = json.loads(text)
        if told["version"] != _VERSION:
            return None
        before = None
        if told["before"] is not None:
            digest = bytes.fromhex(told["before"])
            before = next((each for each in reversed(earlier) if each.digest == digest), None)
            if before is None:
                return None
        token_ids = array("i")
        token_ids.frombytes(tokens)
        beginnings = tuple(_TextPrefix(int(n), bytes.fromhex(it)) for n, it in told["beginnings"])
        answer = KeptAnswer(key, ReadAnswer.of(*told["said"]), beginnings, before, token_ids)
        return answer if answer.digest.hex() == told["digest"] else None

    def _name_of(self, key: bytes) -> bytes:
        digest = hashlib.blake2b(key + self._vocabulary, digest_size=32, person=b"answer")
        return digest.digest() + ANSWERS.to_bytes(2, "little")


class ConversationEncoder:
    """Encodes conversations, and keeps the last answers. It is thread-safe.

    Args:
        max_tokens: how many tokens are kept in memory; the least recently used answers are dropped
            first.

    Attributes:
        num_tokens: how many tokens are kept in memory. Common prefixes count once.
        stored: where answers are also stored; ``None``: nowhere.
    """

    def __init__(self, max_tokens: int = MAX_KEPT_TOKENS):
        self.max_tokens = max_tokens
        self.stored: StoredAnswers | None = None
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
        write: Callable[..., str] = render_chat,
    ) -> Prompt:
        """The prompt of a conversation, with the generated tokens as far as they are known.

        Args:
            messages, template_options: as :func:`render_chat`. ``reasoning_content`` of an
                assistant's message takes precedence over the kept reasoning, even if it is empty.
            cache_salt: answers with other salts are never used.
            check_length: called before a text is encoded, with the number of tokens before it;
                raises if it is too long.
            write: renders the text, with the arguments of :func:`render_chat`.

        Raises:
            ChatTemplateError: as :func:`render_chat`, or the tokenizer can't encode the text.
        """
        normal = normalise_messages(messages)
        keys = _keys(normal, cache_salt)
        kept: list[KeptAnswer] = []
        for message, key in zip(normal, keys, strict=True):
            answer = self._get(key) or self._load(key, message, kept)
            if answer is None:
                continue
            kept.append(answer)
            if message.get("reasoning_content") is None and answer.said.reasoning:
                message["reasoning_content"] = answer.said.reasoning
        for message in normal:
            if message.get("reasoning_content"):
                message["reasoning"] = message["reasoning_content"]  # as other templates call it
        text = write(tokenizer, normal, template_options)
        for answer in reversed(kept):
            end = answer.find_end(tokenizer, template_options, text)
            if end is not None:
                token_ids = answer.all_token_ids()
                check_length(text[end:], len(token_ids))
                token_ids += encode_text(tokenizer, text[end:])
                return Prompt(text, token_ids, answer, keys[-1], tuple(kept))
        check_length(text, 0)
        return Prompt(text, encode_text(tokenizer, text), None, keys[-1], tuple(kept))

    def keep(
        self,
        tokenizer: TokenizerWrapper,
        prompt: Prompt,
        token_ids: Sequence[int],
        message: Mapping[str, Any],
        said: Verbatim | ReadAnswer,
        no_store: bool = False,
    ) -> None:
        """Keep the answer to a prompt.

        Args:
            token_ids: of the answer, without the end of sequence.
            message: the message in which it comes back.
            no_store: keep it in memory only.
        """
        texts = [prompt.text]
        if (text := Dialect.of(tokenizer).without_empty_pair(prompt.text)) is not None:
            # Templates write no such pair in the history.
            texts.append(text)
        before = prompt.before
        num_before = 0 if before is None else before.num_tokens
        answer = KeptAnswer(
            _next_key(prompt.key, message),
            said,
            tuple(map(_TextPrefix.of, texts)),
            before,
            array("i", [*prompt.token_ids[num_before:], *token_ids]),
            no_store or (before is not None and before.is_private),
        )
        replaced = self._put(answer)
        if self.stored is not None and not no_store:
            self.stored.note_used(prompt.answers)
            self.stored.keep(answer, replaced)

    def keep_tokens(
        self,
        tokenizer: TokenizerWrapper,
        messages: Sequence[Mapping[str, Any]],
        token_ids: Sequence[int],
    ) -> None:
        """Keep tokens that encode the beginning of a conversation's text, such as of a file."""
        beginning = _TextPrefix.of(decoded(tokenizer, (), token_ids))
        tokens = array("i", token_ids)
        key = _keys(normalise_messages(messages), None)[-1]
        self._put(KeptAnswer(key, Verbatim(""), (beginning,), None, tokens))

    def _get(self, key: bytes) -> KeptAnswer | None:
        with self._lock:
            answer = self._answers.get(key)
            if answer is not None:
                self._answers.move_to_end(key)
            return answer

    def _load(
        self, key: bytes, message: Mapping[str, Any], earlier: Sequence[KeptAnswer]
    ) -> KeptAnswer | None:
        """An answer that is stored and not in memory."""
        if self.stored is None or message["role"] != "assistant":
            return None
        answer = self.stored.load(key, earlier)
        if answer is not None:
            self._put(answer)
        return answer

    def _put(self, answer: KeptAnswer) -> KeptAnswer | None:
        """Keep an answer in memory; returns the one that it replaces."""
        with self._lock:
            replaced = self._answers.pop(answer.key, None)
            if replaced is not None:
                self.num_tokens -= len(replaced.token_ids)
            self._answers[answer.key] = answer
            self.num_tokens += len(answer.token_ids)
            while self.num_tokens > self.max_tokens:
                _, oldest = self._answers.popitem(last=False)
                self.num_tokens -= len(oldest.token_ids)
        return replaced


def decoded(tokenizer: TokenizerWrapper, before: Sequence[int], token_ids: Sequence[int]) -> str:
    """The text of tokens that follow others."""
    context = list(before[-_NUM_CONTEXT_TOKENS:])
    first, whole = (
        str(
            tokenizer.decode(
                list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )
        for ids in (context, [*context, *token_ids])
    )
    return whole[len(first) :]


def _keys(messages: Sequence[Mapping[str, Any]], cache_salt: str | None) -> list[bytes]:
    """For each message, a key of the conversation up to it, without reasoning."""
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
        # White space around it may come from a mark or from the client.
        said["content"] = message["content"].strip()
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    said["calls"] = [(call["name"], _plain(call.get("arguments"))) for call in calls]
    return hashlib.blake2b(key + _json(said)).digest()


def _digest_of_vocabulary(tokenizer: TokenizerWrapper) -> bytes:
    """A digest of what token ids mean."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    ids = array("q", [*(token for _, token in vocabulary), *sorted(tokenizer.eos_token_ids)])
    text = "\0".join(text for text, _ in vocabulary).encode(errors="surrogatepass")
    return hashlib.blake2b(ids.tobytes() + text).digest()


def _plain(value: Any) -> Any:
    """A JSON value as JavaScript writes it, which writes 1.0 as 1."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, default=repr).encode()
