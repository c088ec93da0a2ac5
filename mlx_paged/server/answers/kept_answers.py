"""Answers of the server that are kept for conversations that come back: clients send them as they
received them, which is not as they were generated.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged.conversation_encoder import ConversationEncoder, Prompt, decoded, same_message
from mlx_paged.request import CompletionOutput
from mlx_paged.server.answers.reader import AnswerFormat, Reading, read_answer


class ReadAnswer(Reading):
    """What an answer says, as the reader tells it apart: its text may be another one."""

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
        written = read_answer(answer_format, text[begin : min(ends)])
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
) -> dict[str, Any] | None:
    """Keep the answer to a prompt, if it is one that can come back; returns the message in which it
    does.

    Args:
        completion: with all of its tokens.
    """
    has_ended = completion.finish_reason in ("stop", "length")
    if not has_ended or isinstance(completion.stop_reason, str):
        return None  # A stop text ends an answer elsewhere than its tokens do.
    token_ids = list(completion.token_ids)
    if token_ids and token_ids[-1] in tokenizer.eos_token_ids:
        token_ids.pop()
    text = decoded(tokenizer, prompt.token_ids, token_ids)
    # With calls that were left out, too: what was told does not say all of these tokens then.
    reading = read_answer(replace(answer_format, max_calls=None), text, completion)
    message = message_of(reading)
    if message is not None:
        kept.keep(tokenizer, prompt, token_ids, message, ReadAnswer(*reading))
    return message


def upcoming_tokens(
    kept: ConversationEncoder,
    tokenizer: TokenizerWrapper,
    messages: Sequence[Mapping[str, Any]],
    template_options: Mapping[str, Any],
    cache_salt: str | None,
    computed: Sequence[int],
) -> tuple[list[int], int]:
    """What the prompt of any next question begins with, and how many of these tokens are computed.

    Args:
        messages: up to the last answer.
        computed: the tokens of the last prompt and its answer.
    """
    # Two questions that have nothing in common.
    prompts = [
        kept.encode(
            tokenizer, [*messages, {"role": "user", "content": text}], template_options, cache_salt
        ).token_ids
        for text in ("?", "Why not")
    ]
    return prompts[0][: _num_same(*prompts)], _num_same(prompts[0], computed)


def _num_same(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two sequences begin with together."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(first), len(second)))


def message_of(reading: Reading) -> dict[str, Any] | None:
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
