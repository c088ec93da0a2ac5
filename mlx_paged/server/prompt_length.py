"""``LengthLimit``: refuses texts of too many tokens without encoding them whole.

A tokenizer takes some 300 bytes and a microsecond for each token of a text, and its caller gets the
whole answer or none. So a long text is counted first, in pieces. Merges across a cut are lost, so
the pieces have a few tokens more than the whole, some in ten thousand of most texts. What passes
the limit with a margin is refused; what is closer to it is encoded whole, and the engine decides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged.chat_template import encode_text
from mlx_paged.errors import PromptTooLongError, prompt_beyond_context

PIECE_LEN = 2**14  # characters; 64 KiB of UTF-8 at most
# Where the context has no end, and of all prompts of a request together.
MAX_PROMPT_TOKENS = 2**20


@dataclass(frozen=True)
class LengthLimit:
    """How long a text may be.

    Args:
        max_model_len: tokens of a prompt and its answer; ``None``: no limit of the model's.
        context_length: the most that ``max_model_len`` may be, for the advice; ``None``: anything.
        check_wanted: called between two pieces; raises if the client has left.
    """

    tokenizer: TokenizerWrapper
    max_model_len: int | None
    context_length: int | None
    check_wanted: Callable[[], None]

    @property
    def max_tokens(self) -> int:
        """More are refused: the limit and a quarter of it, so that no cut can make a difference."""
        return (self.max_model_len or MAX_PROMPT_TOKENS) * 5 // 4

    def check(self, text: str, num_tokens_before: int = 0) -> None:
        """Raise if a text is too long to be encoded.

        Args:
            num_tokens_before: of what the prompt begins with.

        Raises:
            PromptTooLongError: it has more tokens than a prompt can have.
            ChatTemplateError: the tokenizer can't encode it.
        """
        if len(text) <= PIECE_LEN:
            return  # To count it takes as long as to encode it.
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
            f"[prompt] it has more than {self.max_tokens:,} tokens; the server takes "
            f"{MAX_PROMPT_TOKENS:,} at most"
        )
