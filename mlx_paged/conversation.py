"""A chat as turns of text over a session: renders the template, keeps the K/V of all that did not change."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged.engine.session import Session
from mlx_paged.generation import GenerationResponse, stream_generate


class Conversation:
    """Messages and the session that holds their K/V.

    The prompt of a turn is the whole conversation as the model's chat template writes it. What of it the session holds
    is reused; a template that rewrites earlier turns (Qwen3's drops their reasoning) makes only the rewritten rest new.

    Args:
        session: where the K/V live.
        tokenizer: with a chat template.
        system_prompt: the first message, if any.
        enable_thinking: passed to the template; ``None`` leaves it to the model.

    Raises:
        ValueError: the tokenizer has no chat template.
    """

    def __init__(
        self,
        session: Session,
        tokenizer: TokenizerWrapper,
        system_prompt: str | None = None,
        enable_thinking: bool | None = None,
    ):
        if not tokenizer.has_chat_template:
            raise ValueError("[chat] the model's tokenizer has no chat template; use mlx_paged.generate for plain text")
        self.session = session
        self.tokenizer = tokenizer
        self._system_prompt = system_prompt
        self._template_options = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        self.messages = self._first_messages()

    def reset(self) -> None:
        """Forget all turns but the system prompt, and give their K/V back."""
        self.messages = self._first_messages()
        self.session.close()
        self.session.cache.shrink()

    def _first_messages(self) -> list[dict[str, str]]:
        return [] if self._system_prompt is None else [{"role": "system", "content": self._system_prompt}]

    def ask(
        self, text: str, *, progress: Callable[[int, int], None] | None = None, **options: Any
    ) -> Generator[GenerationResponse, None, None]:
        """One turn: yield the answer piece by piece.

        An answer that is cut short (closed by the caller, or at ``max_tokens``) stays in the conversation as far as it
        came. A turn that can't begin leaves the conversation as it was.

        Args:
            progress: called with the prompt tokens done so far and their total.
            options: ``max_tokens``, ``sampler`` and others of :func:`mlx_paged.stream_generate`.

        Raises:
            PromptTooLongError: the budget can't hold the conversation with this turn.
            ValueError: an empty message, or one that the template refuses.
        """
        if not text.strip():
            raise ValueError("[chat] the message is empty")
        self.messages.append({"role": "user", "content": text})
        answer: list[str] = []
        try:
            for response in stream_generate(
                self.session.runner.model,
                self.tokenizer,
                self._prompt_tokens(),
                session=self.session,
                prompt_progress_callback=progress,
                **options,
            ):
                answer.append(response.text)
                yield response
        finally:
            if answer:
                self.messages.append({"role": "assistant", "content": "".join(answer)})
            else:
                self.messages.pop()

    def _prompt_tokens(self) -> list[int]:
        text = self.tokenizer.apply_chat_template(
            self.messages, add_generation_prompt=True, tokenize=False, **self._template_options
        )
        held = self.session.tokens
        held_text = self.tokenizer.decode(held, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if held and text.startswith(held_text):
            # Keep the ids that were generated: encoding their text anew may split it in another way.
            return held + self.tokenizer.encode(text[len(held_text) :], add_special_tokens=False)
        return self.tokenizer.encode(text, add_special_tokens=False)
