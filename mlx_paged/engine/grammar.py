"""Structured outputs: which tokens keep an answer within its grammar.

The grammar engine is llguidance: an Earley parser with a lexer based on derivatives, which walks
the trie of the vocabulary (https://github.com/guidance-ai/llguidance). It fills a mask of one bit
per token on the host, in microseconds, while the device computes the logits.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b
from json import dumps, loads
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged.engine.compiled_grammar import CompiledGrammar, Vocabulary, refusal
from mlx_paged.engine.exact_integers import InexactError, exact_json, with_exact_integers
from mlx_paged.engine.grammar_trial import STACK_NBYTES, Trials
from mlx_paged.engine.json_schema import one_of_as_any_of
from mlx_paged.engine.request import Completion
from mlx_paged.errors import ArgumentError, one_line, reason, request_error
from mlx_paged.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")

NUM_REMEMBERED = 32  # compiled grammars
NUM_REFUSALS = 256  # remembered
# Models break the line after their reasoning; this many tokens of line breaks are allowed.
MAX_LINE_BREAKS = 2

# Separators of JSON with or without a space, as models write them.
_ONE_LINE = {"item_separator": ", ?", "key_separator": ": ?", "whitespace_flexible": False}
_FLEXIBLE = {"whitespace_flexible": True}

# llguidance's errors begin with a place in its grammar, and end with lines of it.
PLACE_IN_GRAMMAR = re.compile(r"\bat \d+\(\d+\): (failed to compile JSON schema: )?")
_LINES_OF_GRAMMAR = re.compile(r"\n *\d+ \| ")


class StructuredOutputError(ValueError):
    """An answer can't be continued within its grammar."""


class GrammarCompiler:
    """Compiles grammars for a model and a tokenizer, and caches the last ones and the last
    refusals. Any thread may call it.

    Args:
        tokenizer: with ``None``, all grammars are refused.
        vocab_size: of the model.
    """

    def __init__(self, tokenizer: TokenizerWrapper | None, vocab_size: int):
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._vocabulary: Vocabulary | None = None
        self._reading = threading.Lock()
        self._remembering = threading.Lock()
        self._matchers: OrderedDict[str, LLMatcher] = OrderedDict()
        self._refusals: OrderedDict[tuple[str, bytes], str] = OrderedDict()  # their messages

    def compile(self, params: StructuredOutputsParams) -> CompiledGrammar:
        """Compile the grammar of a request.

        The first one takes about a second with a vocabulary of 150,000 tokens. Others take
        milliseconds, large ones hundreds of them, and cached ones no time.

        Raises:
            ArgumentError: there is no tokenizer that llguidance can read, the grammar can't be
                compiled, or it has no answer; the message names the argument.
        """
        vocabulary = self.read_vocabulary()
        for name in ("begin_after", "reasoning_start"):
            token = max(getattr(params, name), default=0)
            if token >= vocabulary.vocab_size:
                raise ArgumentError(
                    f"[structured_outputs] {name} has token id {token}, the vocabulary ends at "
                    f"{vocabulary.vocab_size - 1}",
                    name,
                )
        matcher = self._matcher_of(vocabulary, _grammar_text(params), params.kind)
        reasoning = tuple(params.begin_after), tuple(params.reasoning_start)
        return CompiledGrammar(vocabulary, matcher, *reasoning)

    def _matcher_of(self, vocabulary: Vocabulary, text: str, kind: str) -> LLMatcher:
        refusal_key = kind, blake2b(text.encode()).digest()
        with self._remembering:
            matcher = self._matchers.get(text)
            if matcher is not None:
                self._matchers.move_to_end(text)
                return matcher
            if refusal_key in self._refusals:
                self._refusals.move_to_end(refusal_key)
                raise ArgumentError(self._refusals[refusal_key], kind)
        try:
            _try(vocabulary, text, kind)
            matcher = _on_large_stack(lambda: _compile(vocabulary, text, kind))
        except _GrammarError as error:
            with self._remembering:
                _remember(self._refusals, refusal_key, str(error), NUM_REFUSALS)
            raise
        with self._remembering:
            _remember(self._matchers, text, matcher, NUM_REMEMBERED)
        return matcher

    def read_vocabulary(self) -> Vocabulary:
        """The vocabulary, read at the first call. Raises ``ArgumentError`` if that is
        impossible.
        """
        if self._tokenizer is None:
            raise refusal("structured outputs need a tokenizer")
        with self._reading:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary.read(self._tokenizer, self._vocab_size)
            return self._vocabulary


def _remember(values: OrderedDict[K, V], key: K, value: V, most: int) -> None:
    """Store a value, and keep only the last ``most`` values."""
    values[key] = value
    while len(values) > most:
        values.popitem(last=False)


class GrammarState:
    """The state of an answer in its grammar. Tokens are only appended, and each is read once."""

    def __init__(self, grammar: CompiledGrammar):
        self.vocabulary = grammar.vocabulary
        self._begin_after = grammar.begin_after
        self._reasoning_start = grammar.reasoning_start
        self._matcher = grammar.matcher.deep_copy()
        self._num_read = 0  # tokens of the answer
        self._is_structured = not grammar.begin_after
        self._num_free_breaks = 0  # that may still come before the structure

    def fill_mask(self, completion: Completion, mask: np.ndarray) -> None:
        """Fill the mask of the tokens that may come next.

        Args:
            mask: ``[num_words] uint32``, one bit per token, the lowest first.

        Raises:
            StructuredOutputError: the answer has left its grammar, or the grammar is too complex.
        """
        self._read_new_tokens(completion)
        num_tokens, start = completion.num_output_tokens, self._reasoning_start
        is_opening = not self._is_structured and num_tokens < len(start)
        if self._is_structured or (is_opening and num_tokens == 0):
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            self._check("can't go on")
        else:
            mask[:] = 0 if is_opening else self.vocabulary.unstructured
        more = [start[num_tokens]] if is_opening else []
        if self._num_free_breaks:
            more += self.vocabulary.line_breaks
        for token in more:
            word, bit = divmod(token, 32)
            mask[word] |= np.uint32(1 << bit)

    def _read_new_tokens(self, completion: Completion) -> None:
        if self._is_structured:
            tokens = completion.token_ids[completion.num_prompt_tokens + self._num_read :]
        else:
            tokens = self._find_structure(completion.output_token_ids, self._num_read)
        if self._num_free_breaks:
            tokens = self._without_breaks(tokens)
        if tokens and not self._matcher.consume_tokens(tokens):
            self._check("left its grammar")
        self._num_read = completion.num_output_tokens

    def _find_structure(self, answer: list[int], num_read: int) -> list[int]:
        """The tokens of the structure, which begins after the reasoning."""
        start, end = self._reasoning_start, self._begin_after
        if tuple(answer[: len(start)]) != start[: len(answer)]:
            self._is_structured = True
            return answer
        for place in range(max(num_read + 1, len(start) + len(end)), len(answer) + 1):
            if tuple(answer[place - len(end) : place]) == end:
                self._is_structured = True
                self._num_free_breaks = MAX_LINE_BREAKS
                return answer[place:]
        return []

    def _without_breaks(self, tokens: list[int]) -> list[int]:
        """The tokens of the structure after leading line breaks."""
        for number, token in enumerate(tokens):
            if not self._num_free_breaks or token not in self.vocabulary.line_breaks:
                self._num_free_breaks = 0
                return tokens[number:]
            self._num_free_breaks -= 1
        return []

    def _check(self, what: str) -> None:
        if self._matcher.is_error():
            raise StructuredOutputError(
                f"[structured_outputs] the answer {what}: {_message(self._matcher)}"
            )


def fill_masks(
    states: Sequence[GrammarState], completions: Sequence[Completion]
) -> tuple[np.ndarray, dict[int, Exception]]:
    """The tokens that may come next, ``[num_completions, vocab_size] bool``, and errors by entry. A
    failed request may have any token.
    """
    vocabulary = states[0].vocabulary
    words = np.empty((len(states), vocabulary.num_words), np.uint32)
    failed: dict[int, Exception] = {}
    for entry, (state, completion) in enumerate(zip(states, completions, strict=True)):
        try:
            state.fill_mask(completion, words[entry])
        except BaseException as error:  # Panics of Rust are not Exceptions.
            failed[entry] = request_error(error)
            words[entry] = vocabulary.unstructured
    # Unpacking 150,000 bits takes 8 us here, and each operation on the device takes as much.
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
    return bits[:, : vocabulary.vocab_size].view(np.bool_), failed


def _grammar_text(params: StructuredOutputsParams) -> str:
    """The grammar of a request in llguidance's notation."""
    try:
        return _exact_grammar_text(params)
    except InexactError as error:
        raise ArgumentError(f"[structured_outputs] {params.kind} {error}", params.kind) from error


def _exact_grammar_text(params: StructuredOutputsParams) -> str:
    from llguidance import LLMatcher

    if params.kind in ("json", "json_object"):
        schema = '{"type": "object"}' if params.json is None else str(params.json)
        if '"oneOf"' in schema:
            schema = dumps(one_of_as_any_of(loads(schema)))
        options = _FLEXIBLE if params.whitespace_flexible else _ONE_LINE
        exact = exact_json(loads(schema), options) if schema != "true" else None
        if exact is not None:
            return str(LLMatcher.grammar_from_lark(exact))
        try:
            text: str = LLMatcher.grammar_from_json_schema(
                "{}" if schema == "true" else schema,
                overrides=options,  # type: ignore[arg-type]
            )
        except ValueError as error:  # JSON in Rust has no lone surrogates.
            raise ArgumentError(
                f"[structured_outputs] json can't be compiled: {one_line(error)}", "json"
            ) from error
        return text
    if params.choice is not None:
        # The strings of Lark have the escapes of JSON.
        return "start: " + " | ".join(map(dumps, params.choice))
    if params.regex is not None:
        return str(LLMatcher.grammar_from_regex(params.regex))
    return str(LLMatcher.grammar_from_lark(with_exact_integers(params.grammar or "")))


class _GrammarError(ArgumentError):
    """A grammar is refused for a permanent reason, which is cached."""


_trials = Trials()


def _try(vocabulary: Vocabulary, text: str, kind: str) -> None:
    """Refuse a grammar whose compilation would crash this process, or not terminate."""
    try:
        failure = _trials.failure_of(text, vocabulary.light)
    except OSError as error:
        raise refusal(
            "grammars are first compiled in a separate process, which can't be started: "
            f"{reason(error)}"
        ) from error
    if failure is not None:
        error_type = _GrammarError if failure.is_certain else ArgumentError
        raise error_type(f"[structured_outputs] {kind} can't be compiled: it {failure.what}", kind)


def _compile(vocabulary: Vocabulary, text: str, kind: str) -> LLMatcher:
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(verbose_errors=False)
    matcher = LLMatcher(vocabulary.ll_tokenizer, text, log_level=0, limits=limits)
    if matcher.is_error():
        raise _GrammarError(
            f"[structured_outputs] {kind} can't be compiled: {_message(matcher, kind)}", kind
        )
    # The first mask shows whether there is any answer, and fills caches that copies share.
    mask = np.frombuffer(matcher.compute_bitmask(), np.uint32)
    if matcher.is_error() or not mask.any():
        raise _GrammarError(
            f"[structured_outputs] no answer of this vocabulary is in {kind}: "
            f"{_message(matcher, kind)}",
            kind,
        )
    return matcher


def _message(matcher: LLMatcher, kind: str = "grammar") -> str:
    """The matcher's error, with a place in the grammar only if the user has written it."""
    text = matcher.get_error().replace("<non-verbose/>", "")
    text = _LINES_OF_GRAMMAR.split(text)[0]
    if kind != "grammar":
        text = PLACE_IN_GRAMMAR.sub("", text)
    return one_line(text or matcher.stop_reason())


_starting = threading.Lock()


def _on_large_stack(work: Callable[[], T]) -> T:
    """Run a function in a thread whose stack is large enough for deep grammars."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="mlx_paged grammar", daemon=True)
    with _starting:
        before = threading.stack_size(STACK_NBYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if errors:
        raise request_error(errors[0])
    return results[0]
