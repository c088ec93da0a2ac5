"""``AnswerState``: the answer to a request so far, as blocks and numbers of tokens. Each protocol
renders it in its own format.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from mlx_paged.answers.dialect import AnswerFormat
from mlx_paged.answers.events import Kind, ToolCall
from mlx_paged.answers.reader import AnswerReader
from mlx_paged.answers.tokens import TokenPlaces
from mlx_paged.request import CompletionOutput, RequestOutput, StopReason


@dataclass
class Block:
    """A contiguous part of an answer of one kind.

    Args:
        index: the block's index in the answer.
        call: the index, id and name of a call.
        pieces: the pieces of its text.
    """

    index: int
    kind: Kind
    call: ToolCall | None = None
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text so far: reasoning, text, or the arguments of a call."""
        return "".join(self.pieces)


class BlockEvent(NamedTuple):
    """A block begins, its text continues, or it ends. ``block`` is in its state after all events of
    the same part.
    """

    what: Literal["start", "delta", "end"]
    block: Block
    text: str = ""


@dataclass(frozen=True)
class Usage:
    """Numbers of tokens."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_reasoning_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(*map(sum, zip(vars(self).values(), vars(other).values(), strict=True)))


class CompletionState:
    """One completion.

    Attributes:
        blocks: its blocks so far.
        num_tokens: the number of generated tokens.
        has_begun: whether a part has arrived.
        finish_reason: ``"stop"``, ``"length"``, or ``"tool_calls"`` if it stopped after calls;
            ``None`` before the end.
        stop_reason: the stop text or tokens that ended it.
    """

    def __init__(self, index: int, answer_format: AnswerFormat):
        self.index = index
        self.blocks: list[Block] = []
        self.num_tokens = 0
        self.has_begun = False
        self.finish_reason: str | None = None
        self.stop_reason: StopReason = None
        self._open_block: Block | None = None
        self._reader = AnswerReader(answer_format)
        self._format = answer_format
        self._places: TokenPlaces | None = None
        self._unplaced: list[int] = []  # tokens

    @property
    def num_reasoning_tokens(self) -> int:
        """The number of tokens of reasoning, including its marks."""
        if not self._reader.spans or self._format.detokenizer is None:
            return 0
        if self._places is None:
            characters, detokenizer = self._format.marks.characters, self._format.detokenizer()
            self._places = TokenPlaces(characters, detokenizer, self._format.skipped)
        tokens, self._unplaced = self._unplaced, []
        for token in tokens:
            self._places.add(token)
        return self._places.num_in(self._reader.spans)

    def count(self, completion: CompletionOutput) -> None:
        """Count the tokens of the next part, and take over its finish reason."""
        self.has_begun = True
        self.num_tokens += len(completion.token_ids)
        self._unplaced += completion.token_ids
        self.finish_reason, self.stop_reason = completion.finish_reason, completion.stop_reason

    def add(self, completion: CompletionOutput) -> list[BlockEvent]:
        """The events of the next part."""
        self.count(completion)
        events: list[BlockEvent] = []
        for kind, text, call in self._reader.read(completion):
            block = self._open_block
            if block is None or block.kind != kind or call is not None:
                self._end_block(events)
                block = self._open_block = Block(len(self.blocks), kind, call)
                self.blocks.append(block)
                events.append(BlockEvent("start", block))
            if not text:
                continue
            block.pieces.append(text)
            if events and events[-1].what == "delta":  # of the same block
                text = events.pop().text + text
            events.append(BlockEvent("delta", block, text))
        if self.finish_reason is not None:
            self._end_block(events)
            if self.finish_reason == "stop" and self._reader.num_tool_calls:
                self.finish_reason = "tool_calls"
        return events

    def _end_block(self, events: list[BlockEvent]) -> None:
        block, self._open_block = self._open_block, None
        if block is not None:
            events.append(BlockEvent("end", block))


class AnswerState:
    """The answer to one prompt, with one or more completions.

    Args:
        answer_format: how the text is parsed.

    Attributes:
        completions: those that have begun, by index.
    """

    def __init__(self, answer_format: AnswerFormat):
        self.completions: dict[int, CompletionState] = {}
        self._format = answer_format
        self._num_prompt_tokens = self._num_cached_tokens = 0

    def parts(self, output: RequestOutput) -> list[tuple[CompletionState, CompletionOutput]]:
        """The completions in a part of the answer, for :meth:`CompletionState.add`."""
        self._num_prompt_tokens = len(output.prompt_token_ids)
        self._num_cached_tokens = output.num_cached_tokens
        parts = []
        for part in output.outputs:
            completion = self.completions.get(part.index)
            if completion is None:
                completion = CompletionState(part.index, self._format)
                self.completions[part.index] = completion
            # The last part of a request contains all completions, finished ones included.
            if completion.finish_reason is None:
                parts.append((completion, part))
        return parts

    @property
    def usage(self) -> Usage:
        """The tokens so far."""
        completions = self.completions.values()
        return Usage(
            self._num_prompt_tokens,
            self._num_cached_tokens,
            sum(each.num_tokens for each in completions),
            sum(each.num_reasoning_tokens for each in completions),
        )
