"""Structured outputs: the grammar of a request, compiled for the vocabulary of its model.

The grammar engine is llguidance: an Earley parser with a lexer based on derivatives, which walks
the trie of the vocabulary (https://github.com/guidance-ai/llguidance).
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from hashlib import blake2b
from json import dumps, loads
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from mlx_lm.tokenizer_utils import NewlineTokenizer, TokenizerWrapper

from mlx_paged.answers.json_schema import one_of_as_any_of
from mlx_paged.engine.sampling.exact_integers import InexactError, exact_json, with_exact_integers
from mlx_paged.engine.sampling.grammar_trial import STACK_NBYTES, Trials
from mlx_paged.errors import ArgumentError, one_line, reason, request_error
from mlx_paged.options.argument_values import kind_of
from mlx_paged.options.sampling_declarations import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")

NUM_REMEMBERED = 32  # compiled grammars
NUM_REFUSALS = 256  # remembered

# Separators of JSON with or without a space, as models write them.
_ONE_LINE = {"item_separator": ", ?", "key_separator": ": ?", "whitespace_flexible": False}
_FLEXIBLE = {"whitespace_flexible": True}

# llguidance's errors begin with a place in its grammar, and end with lines of it.
PLACE_IN_GRAMMAR = re.compile(r"\bat \d+\(\d+\): (failed to compile JSON schema: )?")
_LINES_OF_GRAMMAR = re.compile(r"\n *\d+ \| ")


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The vocabulary of a model for grammars.

    Attributes:
        ll_tokenizer: llguidance's tokenizer.
        vocab_size: of the model: logits in a row.
        num_words: 32-bit words in a mask, with at least ``vocab_size`` bits.
        unstructured: ``[num_words] uint32``, the mask of all tokens but those that end an answer.
        light: the vocabulary for trials.
        line_breaks: the tokens that consist of one or two line breaks.
    """

    ll_tokenizer: LLTokenizer
    vocab_size: int
    num_words: int
    unstructured: np.ndarray
    light: dict[str, Any]
    line_breaks: frozenset[int]

    @classmethod
    def read(cls, tokenizer: TokenizerWrapper, vocab_size: int) -> Vocabulary:
        """Read the vocabulary of a tokenizer; takes about a second with 150,000 tokens.

        Args:
            vocab_size: of the model, which may have more or fewer tokens than the tokenizer. Tokens
                that the tokenizer lacks are never sampled.

        Raises:
            ArgumentError: llguidance is not installed, it can't read the tokenizer, or the model
                has no end of sequence.
        """
        try:
            from llguidance import hf
        except ImportError as error:
            raise _refusal(
                "structured outputs need llguidance; pip install 'mlx-paged[server]'"
            ) from error
        inner = tokenizer._tokenizer
        if isinstance(inner, NewlineTokenizer) or not hasattr(inner, "backend_tokenizer"):
            raise _refusal(
                f"structured outputs need a fast tokenizer of Hugging Face, got {kind_of(inner)}"
            )
        eos_token_ids = [each for each in sorted(tokenizer.eos_token_ids) if each < vocab_size]
        if not eos_token_ids:
            raise _refusal("structured outputs need a tokenizer with an end of sequence")
        token_ids = np.array(sorted(inner.get_vocab().values()))
        num_tokens = max(vocab_size, int(token_ids.max()) + 1)
        try:
            ll_tokenizer = hf.from_tokenizer(inner, n_vocab=num_tokens, eos_token=eos_token_ids)
        except Exception as error:
            raise _refusal(f"llguidance can't use the tokenizer: {reason(error)}") from error
        num_words = (ll_tokenizer.vocab_size + 31) // 32
        bits = np.zeros(num_words * 32, np.bool_)
        bits[token_ids] = True
        bits[eos_token_ids] = False
        unstructured = np.packbits(bits, bitorder="little").view(np.uint32)
        special = {str(added): token for token, added in inner.added_tokens_decoder.items()}
        light = {"num_tokens": num_tokens, "special": special, "eos": eos_token_ids}
        encoded = (tokenizer.encode(text, add_special_tokens=False) for text in ("\n", "\n\n"))
        line_breaks = frozenset(
            tokens[0] for tokens in encoded if len(tokens) == 1 and tokens[0] < vocab_size
        )
        return cls(ll_tokenizer, vocab_size, num_words, unstructured, light, line_breaks)


@dataclass(frozen=True, eq=False)
class CompiledGrammar:
    """The grammar of a request's answers.

    Attributes:
        matcher: in the state at the beginning of an answer; copied for each, and never modified.
        begin_after: token ids that end the reasoning, after which the structure begins.
        reasoning_start: token ids that begin the reasoning. Without them, the structure begins at
            the first token.
    """

    vocabulary: Vocabulary
    matcher: LLMatcher
    begin_after: tuple[int, ...] = ()
    reasoning_start: tuple[int, ...] = ()


def _refusal(message: str) -> ArgumentError:
    """The error of a request whose ``structured_outputs`` are not supported."""
    return ArgumentError(f"[structured_outputs] {message}", "structured_outputs")


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
            raise _refusal("structured outputs need a tokenizer")
        with self._reading:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary.read(self._tokenizer, self._vocab_size)
            return self._vocabulary


def _remember(values: OrderedDict[K, V], key: K, value: V, most: int) -> None:
    """Store a value, and keep only the last ``most`` values."""
    values[key] = value
    while len(values) > most:
        values.popitem(last=False)


def _grammar_text(params: StructuredOutputsParams) -> str:
    """The grammar of a request in llguidance's notation."""
    from llguidance import LLMatcher

    try:
        if params.choice is not None:
            # The strings of Lark have the escapes of JSON.
            return "start: " + " | ".join(map(dumps, params.choice))
        if params.regex is not None:
            return str(LLMatcher.grammar_from_regex(params.regex))
        if params.grammar is not None:
            return str(LLMatcher.grammar_from_lark(with_exact_integers(params.grammar)))
        schema = {"type": "object"} if params.json is None else loads(str(params.json))
        schema = {} if schema is True else one_of_as_any_of(schema)
        options: Any = _FLEXIBLE if params.whitespace_flexible else _ONE_LINE
        exact = exact_json(schema, options)
        if exact is not None:
            return str(LLMatcher.grammar_from_lark(exact))
        return str(LLMatcher.grammar_from_json_schema(dumps(schema), overrides=options))
    except InexactError as error:
        raise ArgumentError(f"[structured_outputs] {params.kind} {error}", params.kind) from error
    except ValueError as error:  # JSON in Rust has no lone surrogates.
        raise ArgumentError(
            f"[structured_outputs] {params.kind} can't be compiled: {one_line(error)}", params.kind
        ) from error


class _GrammarError(ArgumentError):
    """A grammar is refused for a permanent reason, which is cached."""


_trials = Trials()


def _try(vocabulary: Vocabulary, text: str, kind: str) -> None:
    """Refuse a grammar whose compilation would crash this process, or not terminate."""
    try:
        failure = _trials.failure_of(text, vocabulary.light)
    except OSError as error:
        raise _refusal(
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
            f"[structured_outputs] {kind} can't be compiled: {matcher_error(matcher, kind)}", kind
        )
    # The first mask shows whether there is any answer, and fills caches that copies share.
    mask = np.frombuffer(matcher.compute_bitmask(), np.uint32)
    if matcher.is_error() or not mask.any():
        raise _GrammarError(
            f"[structured_outputs] no answer of this vocabulary is in {kind}: "
            f"{matcher_error(matcher, kind)}",
            kind,
        )
    return matcher


def matcher_error(matcher: LLMatcher, kind: str = "grammar") -> str:
    """What is wrong, with a place in the grammar only if the user has written it."""
    text = matcher.get_error().replace("<non-verbose/>", "")
    text = _LINES_OF_GRAMMAR.split(text)[0]
    if kind != "grammar":
        text = PLACE_IN_GRAMMAR.sub("", text)
    return one_line(text or matcher.stop_reason())


_starting = threading.Lock()


def _on_large_stack(work: Callable[[], T]) -> T:
    """Run a function in a thread whose stack is large enough for deep grammars."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    thread = threading.Thread(target=run, name="mlx_paged grammar", daemon=True)
    with _starting:
        before = threading.stack_size(STACK_NBYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    if (error := result.exception()) is not None:
        raise request_error(error)
    return result.result()
