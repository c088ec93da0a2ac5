"""Keeps answers for continued conversations: clients send answers back as they received them, which
differs from the generated text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged.answers.dialect import AnswerFormat
from mlx_paged.answers.reader import Reading, read_answer
from mlx_paged.answers.tokens import TokenPlaces
from mlx_paged.conversation_encoder import ConversationEncoder, Prompt, same_message
from mlx_paged.engine.input_processor import special_token_ids
from mlx_paged.engine.text_stream import TokenTexts
from mlx_paged.request import CompletionOutput


class ReadAnswer(Reading):
    """A kept answer, compared by its reasoning, text and calls instead of its exact text."""

    @classmethod
    def of(cls, reasoning: str, text: str, calls: Sequence[Sequence[str]]) -> ReadAnswer:
        """The answer of these :meth:`parts`."""
        texts = reasoning, text, *(each for call in calls for each in call)
        if not all(isinstance(each, str) for each in texts):
            raise TypeError("an answer consists of texts")
        return cls(reasoning, text, tuple((name, arguments) for name, arguments in calls))

    def parts(self) -> Sequence[Any]:
        """See :class:`Said`."""
        return tuple(self)

    def find_end(
        self,
        tokenizer: TokenizerWrapper,
        template_options: Mapping[str, Any],
        text: str,
        begin: int,
    ) -> int | None:
        """See :class:`Said`."""
        names = tokenizer.convert_ids_to_tokens(sorted(tokenizer.eos_token_ids))
        ends = [place for name in names if name and (place := text.find(name, begin)) >= 0]
        if not ends:
            return None
        tools = template_options.get("tools") or ()
        answer_format = AnswerFormat.of(tokenizer, text[:begin], tools)
        written = read_answer(answer_format, answer_format.marks.encode(text[begin : min(ends)]))
        is_same = written.reasoning.strip() == self.reasoning.strip() and same_message(
            message_of(written), message_of(self)
        )
        return min(ends) if is_same else None


def keep_answer(
    kept: ConversationEncoder,
    tokenizer: TokenizerWrapper,
    prompt: Prompt,
    answer_format: AnswerFormat,
    completion: CompletionOutput,
    no_store: bool = False,
) -> dict[str, Any] | None:
    """Keep the answer to a prompt if clients can send it back; returns it as a message.

    Args:
        completion: with all of its tokens.
        no_store: keep it in memory only.
    """
    has_ended = completion.finish_reason in ("stop", "length")
    if not has_ended or isinstance(completion.stop_reason, str):
        return None  # After a stop text, the tokens are longer than the text.
    token_ids = list(completion.token_ids)
    if token_ids and token_ids[-1] in tokenizer.eos_token_ids:
        token_ids.pop()
    text = _marked_text(tokenizer, prompt, token_ids, answer_format)
    # Including calls beyond max_calls: then the client's message differs, and there is no match.
    whole_format = replace(answer_format, max_calls=None)
    reading = read_answer(whole_format, text, completion)
    if completion.finish_reason == "length" and read_answer(whole_format, text) != reading:
        return None  # The tokens end with half a call, which the client has not seen.
    message = message_of(reading)
    if message is not None:
        said = ReadAnswer(*reading)
        kept.keep(tokenizer, prompt, token_ids, message, said, no_store)
    return message


def _marked_text(
    tokenizer: TokenizerWrapper, prompt: Prompt, token_ids: Sequence[int], form: AnswerFormat
) -> str:
    """The text of an answer, in which a mark that is a token differs from one that is text."""
    detokenizer = TokenTexts.of(tokenizer).detokenizer(prompt.token_ids)
    places = TokenPlaces(form.marks.characters, detokenizer, special_token_ids(tokenizer))
    return "".join(map(places.add, token_ids)) + detokenizer.finish()


def upcoming_tokens(
    kept: ConversationEncoder,
    tokenizer: TokenizerWrapper,
    messages: Sequence[Mapping[str, Any]],
    template_options: Mapping[str, Any],
    cache_salt: str | None,
    computed: Sequence[int],
) -> tuple[list[int], int]:
    """The beginning of the prompt of any next question, and how many of its tokens are computed.

    Args:
        messages: the conversation up to the last answer.
        computed: the tokens of the last prompt and its answer.
    """
    # Two questions with no common beginning.
    prompts = [
        kept.encode(
            tokenizer, [*messages, {"role": "user", "content": text}], template_options, cache_salt
        ).token_ids
        for text in ("?", "Why not")
    ]
    return prompts[0][: _num_same(*prompts)], _num_same(prompts[0], computed)


def _num_same(first: Sequence[int], second: Sequence[int]) -> int:
    """The length of the common prefix of two sequences."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(first), len(second)))


def message_of(reading: Reading) -> dict[str, Any] | None:
    """The answer as a message of the assistant; ``None`` if clients can't send it back as it is."""
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
