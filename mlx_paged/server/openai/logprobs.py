"""Log-probabilities in the formats of chat, completions, and vLLM's ``prompt_logprobs``."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_paged.engine.text_stream import TokenTexts
from mlx_paged.request import Logprob

LEAST = -9999.0  # instead of minus infinity, which JSON can't represent


class TokenNames:
    """The names of tokens in logprobs.

    Args:
        as_ids: use ``"token_id:17"`` instead of their texts.
    """

    def __init__(self, texts: TokenTexts, as_ids: bool = False):
        self.texts = texts
        self._as_ids = as_ids

    def __getitem__(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self.texts.text_of(token_id)


def chat_logprobs(
    names: TokenNames,
    token_ids: Sequence[int],
    entries: Sequence[Mapping[int, Logprob]],
    num_top: int,
) -> dict[str, Any]:
    """``logprobs`` of a chat choice: an entry for each token of the answer, including marks of
    reasoning and tool calls.
    """
    return {
        "content": [
            {
                **_chat_token(names, token, entry[token]),
                "top_logprobs": [_chat_token(names, *each) for each in most_likely(entry, num_top)],
            }
            for token, entry in zip(token_ids, entries, strict=True)
        ],
        "refusal": None,
    }


def _chat_token(names: TokenNames, token_id: int, entry: Logprob) -> dict[str, Any]:
    return {
        "token": names[token_id],
        "logprob": max(entry.logprob, LEAST),
        "bytes": list(names.texts.bytes_of(token_id)),
    }


def most_likely(entry: Mapping[int, Logprob], num_top: int) -> list[tuple[int, Logprob]]:
    """The ``num_top`` most likely tokens of a position; ``entry`` may also have the sampled one."""
    ranked = sorted(entry.items(), key=lambda item: item[1].rank)
    return [item for item in ranked if item[1].rank <= num_top][:num_top]


class CompletionLogprobs:
    """``logprobs`` of a completions choice, with the text offset of each token.

    Args:
        num_top: the number of alternatives per position.
    """

    def __init__(self, names: TokenNames, num_top: int):
        self._names = names
        self._num_top = num_top
        self._num_characters = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def of(
        self, token_ids: Sequence[int], entries: Sequence[Mapping[int, Logprob] | None]
    ) -> dict[str, Any]:
        """The logprobs of the next tokens. The first token of a prompt has none."""
        offsets = []
        for token in token_ids:
            offsets.append(self._num_characters)
            self._num_characters += len(self._decoder.decode(self._names.texts.bytes_of(token)))
        pairs = list(zip(token_ids, entries, strict=True))
        return {
            "tokens": [self._names[token] for token in token_ids],
            "token_logprobs": [
                None if entry is None else max(entry[token].logprob, LEAST)
                for token, entry in pairs
            ],
            "top_logprobs": [self._top(token, entry) for token, entry in pairs],
            "text_offset": offsets,
        }

    def _top(self, token: int, entry: Mapping[int, Logprob] | None) -> dict[str, float] | None:
        if entry is None:
            return None
        # The token itself is always included, as in OpenAI's API.
        likely = dict(most_likely(entry, self._num_top)) | {token: entry[token]}
        return {self._names[each]: max(likely[each].logprob, LEAST) for each in likely}


def prompt_logprobs(
    names: TokenNames, entries: Sequence[Mapping[int, Logprob] | None]
) -> list[dict[str, Any] | None]:
    """vLLM's field: a dictionary by token id for each token of the prompt."""
    return [
        None
        if entry is None
        else {
            str(token): {
                "logprob": max(each.logprob, LEAST),
                "rank": each.rank,
                "decoded_token": names.texts.text_of(token),
            }
            for token, each in entry.items()
        }
        for entry in entries
    ]
