"""``LengthLimit``: refuses texts with too many tokens without encoding them as a whole.

A tokenizer takes about 300 bytes and a microsecond per token of a text, and can't be interrupted.
So the tokens of a long text are counted first, in pieces. Merges across the cuts are lost, so the
pieces have slightly more tokens than the whole, about one in ten thousand for most texts. A text
that exceeds the limit by a margin is refused; otherwise it is encoded as a whole, and the engine
decides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged.chat_template import encode_text
from mlx_paged.errors import PromptTooLongError, prompt_beyond_context

PIECE_LEN = 2**14  # characters; at most 64 KiB of UTF-8
# For models without a context limit, and for all prompts of a request together.
MAX_PROMPT_TOKENS = 2**20


@dataclass(frozen=True)
class LengthLimit:
    """A limit on the length of texts to encode.

    Args:
        max_model_len: tokens of a prompt and its answer; ``None``: no limit.
        context_length: the largest possible ``max_model_len``, for the error's advice; ``None``:
            no limit.
        check_wanted: called between two pieces; raises if the client has disconnected.
    """

    tokenizer: TokenizerWrapper
    max_model_len: int | None
    context_length: int | None
    check_wanted: Callable[[], None]

    @property
    def max_tokens(self) -> int:
        """The limit plus a margin of a quarter, so that the effect of cuts does not matter."""
        return (self.max_model_len or MAX_PROMPT_TOKENS) * 5 // 4

    def check(self, text: str, num_tokens_before: int = 0) -> None:
        """Raise if a text is too long to be encoded.

        Args:
            num_tokens_before: tokens of the prompt before the text.

        Raises:
            PromptTooLongError: there are more tokens than a prompt may have.
            ChatTemplateError: the tokenizer can't encode the text.
        """
        if len(text) <= PIECE_LEN:
            return  # Counting would take as long as encoding.
        num_tokens = num_tokens_before
        for start in range(0, len(text), PIECE_LEN):
            self.check_wanted()
            num_tokens += len(encode_text(self.tokenizer, text[start : start + PIECE_LEN]))
            if num_tokens > self.max_tokens:
                raise self._refusal()

    def _refusal(self) -> PromptTooLongError:
        if self.max_model_len is not None:
            num_tokens = f"more than {self.max_tokens}"
            return prompt_beyond_context(num_tokens, self.max_model_len, self.context_length)
        return PromptTooLongError(
            f"[prompt] it has more than {self.max_tokens:,} tokens; the server accepts at most "
            f"{MAX_PROMPT_TOKENS:,}"
        )
