"""A chat as turns of text: renders the template, so that all that did not change keeps its K/V."""

from __future__ import annotations

import copy
from collections.abc import Generator
from contextlib import closing

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged.generation import GenerationResponse
from mlx_paged.request import SamplingParams
from mlx_paged.responder import Progress, Responder


class Conversation:
    """Messages, and whoever answers them and keeps their K/V.

    The prompt of a turn is the whole conversation as the model's chat template writes it. What of it was computed
    before is reused; a template that rewrites earlier turns (Qwen3's drops their reasoning) makes only the rewritten
    rest new.

    Args:
        responder: where answers come from.
        tokenizer: with a chat template.
        system_prompt: the first message, if any.
        enable_thinking: passed to the template; ``None`` leaves it to the model.

    Raises:
        ValueError: the tokenizer has no chat template.
    """

    def __init__(
        self,
        responder: Responder,
        tokenizer: TokenizerWrapper,
        system_prompt: str | None = None,
        enable_thinking: bool | None = None,
    ):
        if not tokenizer.has_chat_template:
            raise ValueError("[chat] the model's tokenizer has no chat template; use mlx_paged.generate for plain text")
        self.responder = responder
        self.tokenizer = tokenizer
        self._system_prompt = system_prompt
        self._template_options = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        self.messages = self._first_messages()

    def reset(self) -> None:
        """Forget all turns but the system prompt, and give up their K/V."""
        self.messages = self._first_messages()
        self.responder.close()

    def fork(self) -> Conversation:
        """A branch: a second conversation that goes on from here and shares the K/V of all turns so far.

        Raises:
            CacheFullError: the K/V are in a basic cache, and a copy does not fit.
        """
        branch = copy.copy(self)
        branch.responder = self.responder.fork()
        branch.messages = [dict(message) for message in self.messages]
        return branch

    def _first_messages(self) -> list[dict[str, str]]:
        return [] if self._system_prompt is None else [{"role": "system", "content": self._system_prompt}]

    def ask(
        self, text: str, params: SamplingParams | None = None, *, progress: Progress | None = None
    ) -> Generator[GenerationResponse, None, None]:
        """One turn: yield the answer piece by piece.

        An answer that is cut short (closed by the caller, or at ``max_tokens``) stays in the conversation as far as it
        came. A turn that can't begin leaves the conversation as it was.

        Args:
            params: ``max_tokens`` and how to sample; greedy by default.
            progress: called with the prompt tokens done so far and their total.

        Raises:
            PromptTooLongError: the budget can't hold the conversation with this turn.
            ValueError: an empty message, or one that the template refuses.
        """
        if not text.strip():
            raise ValueError("[chat] the message is empty")
        self.messages.append({"role": "user", "content": text})
        answer: list[str] = []
        try:
            with closing(self.responder.respond(self._prompt_tokens(), params or SamplingParams(), progress)) as pieces:
                for response in pieces:
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
        held = self.responder.tokens
        held_text = self.tokenizer.decode(held, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if held and text.startswith(held_text):
            # Keep the ids that were generated: encoding their text anew may split it in another way.
            return held + self.tokenizer.encode(text[len(held_text) :], add_special_tokens=False)
        return self.tokenizer.encode(text, add_special_tokens=False)
