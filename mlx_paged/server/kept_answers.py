"""What the server keeps of finished answers for the next request of a conversation.

- The tokens of an answer, since clients send answers back as they received them, which differs from
  the generated text (:func:`keep_answer`).
- The items of a response, for clients that send an ``item_reference`` instead (:class:`KeptItems`).
- The likely beginning of the next prompt, computed while no request runs (:class:`IdlePrefill`).
  Templates drop the reasoning of a finished answer from the history, so the prompt of a new
  question after a loop of tool calls has never been computed.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged.answers.conversation_encoder import ConversationEncoder, Prompt, ReadAnswer
from mlx_paged.answers.dialect import AnswerFormat
from mlx_paged.answers.reader import read_answer
from mlx_paged.answers.tokens import TokenPlaces
from mlx_paged.engine.async_engine import AsyncEngine
from mlx_paged.engine.input_processor import special_token_ids
from mlx_paged.engine.options import RequestOptions
from mlx_paged.engine.text_stream import token_texts_of
from mlx_paged.options.sampling_params import RequestOutputKind, SamplingParams
from mlx_paged.request import MAX_PRIORITY, CompletionOutput

logger = logging.getLogger("mlx_paged.server")
MAX_KEPT_CHARACTERS = 2**25  # of JSON
MAX_WAITING = 8  # conversations; the oldest ones are dropped
# Tokens computed in one request, so that other requests wait for at most one such step.
PIECE_LEN = 512
MIN_NEW_TOKENS = 64  # fewer are not worth a request
PAUSE = 0.05  # seconds between two checks whether the engine is idle


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
    answer = ReadAnswer(*read_answer(whole_format, text, completion))
    if completion.finish_reason == "length" and read_answer(whole_format, text) != answer:
        return None  # The tokens end with half a call, which the client has not seen.
    message = answer.message()
    if message is not None:
        kept.keep(tokenizer, prompt, token_ids, message, answer, no_store)
    return message


def _marked_text(
    tokenizer: TokenizerWrapper, prompt: Prompt, token_ids: Sequence[int], form: AnswerFormat
) -> str:
    """The text of an answer, in which a mark that is a token differs from one that is text."""
    detokenizer = token_texts_of(tokenizer).detokenizer(prompt.token_ids)
    places = TokenPlaces(form.marks.characters, detokenizer, special_token_ids(tokenizer))
    return "".join(map(places.add, token_ids)) + detokenizer.finish()


def upcoming_tokens(
    encode: Callable[[str], list[int]], computed: Sequence[int]
) -> tuple[list[int], int]:
    """The beginning of the prompt of any next question, and how many of its tokens are computed.

    Args:
        encode: the tokens of the prompt of a question.
        computed: the tokens of the last prompt and its answer.
    """
    first, second = encode("?"), encode("Why not")  # They have no common beginning.
    return first[: _num_same(first, second)], _num_same(first, computed)


def _num_same(first: Sequence[int], second: Sequence[int]) -> int:
    """The length of the common prefix of two sequences."""
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


_ONE_TOKEN = SamplingParams(
    max_tokens=1, output_kind=RequestOutputKind.FINAL_ONLY, detokenize=False
)

Encode: TypeAlias = Callable[[], tuple[Sequence[int], int]]


class IdlePrefill:
    """Prefills expected prompts, one at a time: in small steps, at the lowest priority, and
    interrupted as soon as a request arrives. Used from one event loop.

    Args:
        run: runs a function in the tokenizer pool for a user.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        run: Callable[[str | None, Encode], Awaitable[tuple[Sequence[int], int]]],
    ):
        self._engine = engine
        self._run_in_thread = run
        self._waiting: OrderedDict[bytes, tuple[Encode, RequestOptions]] = OrderedDict()
        self._task: asyncio.Task[None] | None = None
        self._request_id: str | None = None  # of the piece being computed
        self._numbers = itertools.count()

    @property
    def is_done(self) -> bool:
        """Whether all expected prompts have been computed."""
        return self._task is None or self._task.done()

    def expect(self, key: bytes, encode: Encode, options: RequestOptions) -> None:
        """Compute the likely beginning of a next prompt when the engine is idle.

        Args:
            key: identifies the conversation; a later call with the same key replaces an earlier
                one.
            encode: returns the tokens, and how many of them are computed already. Called in a
                thread of the tokenizer pool.
            options: the engine's, of the conversation.
        """
        self._waiting[key] = encode, options
        while len(self._waiting) > MAX_WAITING:
            self._waiting.popitem(last=False)
        loop = asyncio.get_running_loop()
        if self._task is None or self._task.done() or self._task.get_loop() is not loop:
            self._task = loop.create_task(self._run())

    def pause(self) -> None:
        """Interrupt the prefill for a request; it resumes when the engine is idle again."""
        if self._request_id is not None:
            self._engine.abort(self._request_id)

    async def _run(self) -> None:
        while self._waiting:
            await self._until_idle()
            _, (encode, options) = self._waiting.popitem(last=False)
            try:
                await self._compute(encode, {**options, "priority": MAX_PRIORITY})
            except Exception as error:
                # For example, it does not fit into the context or the budget.
                logger.debug("a prompt was not computed ahead: %s", type(error).__name__)

    async def _compute(self, encode: Encode, options: RequestOptions) -> None:
        token_ids, num_known = await self._run_in_thread(options.get("user"), encode)
        if len(token_ids) - num_known < MIN_NEW_TOKENS:
            return
        ends = [*range(num_known + PIECE_LEN, len(token_ids), PIECE_LEN), len(token_ids)]
        for end in ends:
            while not await self._compute_piece(options, list(token_ids[:end])):
                pass

    async def _compute_piece(self, options: RequestOptions, token_ids: list[int]) -> bool:
        """Compute the beginning of a prompt; returns false if that was interrupted."""
        await self._until_idle()
        self._request_id = f"ahead-{next(self._numbers)}"
        try:
            async for output in self._engine.generate(
                {"prompt_token_ids": token_ids},
                _ONE_TOKEN,
                request_id=self._request_id,
                **options,
            ):
                if output.outputs[0].finish_reason == "abort":
                    return False
        finally:
            self._request_id = None
        return True

    async def _until_idle(self) -> None:
        while self._engine.engine.has_unfinished_requests():
            await asyncio.sleep(PAUSE)


class KeptItems:
    """Recent items by owner and id, in memory. Thread-safe.

    Args:
        max_characters: the limit, beyond which the least recently used items are dropped.
    """

    def __init__(self, max_characters: int = MAX_KEPT_CHARACTERS):
        self._max_characters = max_characters
        self._num_characters = 0
        self._items: OrderedDict[tuple[str | None, str], str] = OrderedDict()
        self._lock = threading.Lock()

    def keep(self, owner: str | None, items: Iterable[dict[str, Any]]) -> None:
        """Keep the items of a response to ``owner``."""
        with self._lock:
            for item in items:
                text = json.dumps(item)
                key = owner, str(item["id"])
                self._num_characters += len(text) - len(self._items.pop(key, ""))
                self._items[key] = text
            while self._num_characters > self._max_characters:
                _, text = self._items.popitem(last=False)
                self._num_characters -= len(text)

    def find(self, owner: str | None, item_id: str) -> dict[str, Any] | None:
        """The item with this id in a response to ``owner``, if it is still kept."""
        with self._lock:
            text = self._items.get((owner, item_id))
            if text is None:
                return None
            self._items.move_to_end((owner, item_id))
        item: dict[str, Any] = json.loads(text)
        return item
