"""``InputProcessor``: checks the arguments of users and makes requests from them. Prompts in all
supported forms become token ids, and parameters become rules for tokens of this model.
"""

from __future__ import annotations

import functools
import itertools
import numbers
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged.answers.chat_template import encode_text
from mlx_paged.answers.dialect import AnswerFormat, Dialect
from mlx_paged.answers.tokens import ReasoningLimit, TokenReader
from mlx_paged.engine.request import NO_RULES, Request, TokenRules
from mlx_paged.engine.sampling.grammar import GrammarCompiler
from mlx_paged.engine.text_stream import TextStream, token_texts_of
from mlx_paged.errors import (
    ArgumentError,
    PromptTooLongError,
    prompt_beyond_context,
    reason,
    shown,
)
from mlx_paged.models.adapters import Adapter
from mlx_paged.models.language_model import LanguageModel
from mlx_paged.options.argument_values import (
    BOOL,
    TokenIds,
    check_token_ids,
    is_array,
    is_sequence,
    kind_of,
    read_array,
)
from mlx_paged.options.sampling_params import PoolingParams, SamplingParams
from mlx_paged.request import NAME, PRIORITY, REQUEST_ID

PIECE_LEN = 2**14  # characters of a text that are encoded at a time to count its tokens
MAX_PROMPT_TOKENS = 2**20  # of a text for a model without a limit

# A dict has "prompt", a text, or "prompt_token_ids". Type checkers do not recognise TypedDicts in
# unions such as this one.
Prompt: TypeAlias = "str | TokenIds | Mapping[str, Any]"


def read_prompt(
    prompt: object, tokenizer: TokenizerWrapper | None, vocab_size: int, name: str = "prompt"
) -> tuple[str | None, list[int]]:
    """Check a prompt and return its text, ``None`` if there are only token ids, and its token ids:
    at least one, each in the model's vocabulary. Any thread may call it.

    Args:
        prompt: text; token ids as a sequence or a 1-d array of integers of any type; or vLLM's
            dicts ``{"prompt": text}`` and ``{"prompt_token_ids": ids}``. If both keys are given,
            the ids are the prompt, and the text is kept for the output.
        tokenizer: for text; with ``None``, only token ids are accepted.
        vocab_size: each id must be below it.
        name: of the argument, for error messages.

    Raises:
        ValueError: it has another type, is empty, can't be encoded, or has a token outside the
            vocabulary; the message is one line that names the argument.
    """
    text, token_ids = _split_dict(prompt, name) if isinstance(prompt, Mapping) else (None, prompt)
    if isinstance(token_ids, str):
        text, token_ids = token_ids, encode_prompt(tokenizer, token_ids, name)
    ids = check_token_ids(token_ids, vocab_size, name)
    if not ids:
        raise ArgumentError(f"[prompt] the prompt is empty; give at least one token as {name}")
    return text, ids


def as_tokenizer(tokenizer: object) -> TokenizerWrapper:
    """The tokenizer in mlx-lm's wrapper; raises ``ValueError`` for anything else."""
    if isinstance(tokenizer, TokenizerWrapper):
        return tokenizer
    if isinstance(tokenizer, type) or not all(
        hasattr(tokenizer, name) for name in ("encode", "decode", "eos_token_id")
    ):
        raise ArgumentError(
            "[tokenizer] tokenizer must be one that mlx_paged.load returns, got "
            f"{kind_of(tokenizer)}"
        )
    with _foreign_code("[tokenizer] tokenizer can't be used"):
        return TokenizerWrapper(tokenizer)


def split_prompts(prompts: object) -> list[Any]:
    """Split the argument of a call that accepts one or several prompts, by vLLM's rules, without
    checking the prompts.

    A text, a dict, a sequence that begins with a number and a 1-d array are one prompt. A 2-d array
    has a prompt in each row.

    Raises:
        ValueError: it is neither a prompt nor a sequence of prompts.
    """
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if is_array(prompts):
        if prompts.ndim not in (1, 2):
            raise ArgumentError(
                f"[prompt] prompts is an array of shape {tuple(prompts.shape)}; give one dimension "
                "for one prompt, or two for a prompt in each row"
            )
        prompts = read_array(prompts, "prompts")
    if not is_sequence(prompts):
        raise ArgumentError(
            f"[prompt] prompts must be a prompt (text, token ids or a dict) or a list of prompts, "
            f"got {kind_of(prompts)}"
        )
    first = prompts[0] if len(prompts) else None
    is_token = isinstance(first, numbers.Number) or (is_array(first) and first.ndim == 0)
    return [prompts] if is_token else list(prompts)


def encode_prompt(tokenizer: TokenizerWrapper | None, text: str, name: str = "prompt") -> list[int]:
    """Encode a text like mlx-lm: with special tokens, unless it begins with them.

    Raises:
        ValueError: there is no tokenizer, or it can't encode the text.
    """
    if tokenizer is None:
        raise ArgumentError(f"[prompt] a text prompt needs a tokenizer; give token ids as {name}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ArgumentError(
            f"[prompt] {name} is not valid Unicode: {text[error.start]!r} at position "
            f"{error.start} is half a character; decode the text with errors='replace'"
        ) from error
    has_bos = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
    with _foreign_code(f"[prompt] the tokenizer can't encode {name}"):
        token_ids: list[int] = tokenizer.encode(text, add_special_tokens=not has_bos)
    return token_ids


@contextmanager
def _foreign_code(message: str, argument: str | None = None) -> Iterator[None]:
    """Turn whatever a tokenizer raises, which may be third-party code, into an ``ArgumentError``
    that begins with this message.
    """
    try:
        yield
    except Exception as error:
        raise ArgumentError(f"{message}: {reason(error)}", argument) from error


def _split_dict(prompt: Mapping[object, object], name: str) -> tuple[str | None, object]:
    """The text, and what is to be read: the token ids if there are some, else the text."""
    given = {key: value for key, value in prompt.items() if value is not None}
    text, token_ids = given.pop("prompt", None), given.pop("prompt_token_ids", None)
    if text is None and token_ids is None:
        keys = shown(list(prompt))
        raise ArgumentError(
            f"[prompt] a prompt is text or token ids, got {kind_of(prompt)} with keys {keys} as "
            f"{name}; a dict has 'prompt' (text) or 'prompt_token_ids'"
        )
    if given:
        key = next(iter(given))
        way_out = "; give it to add_request instead" if key in ("cache_salt", "no_store") else ""
        raise ArgumentError(
            f"[prompt] {name}[{key!r}] is not supported, only text and token ids are{way_out}"
        )
    if text is not None and not isinstance(text, str):
        raise ArgumentError(f"[prompt] {name}['prompt'] must be text, got {kind_of(text)}")
    if isinstance(token_ids, (str, Mapping)):
        raise ArgumentError(
            f"[prompt] {name}['prompt_token_ids'] must be token ids, got {kind_of(token_ids)}"
        )
    return text, text if token_ids is None else token_ids


def read_token_rules(
    params: SamplingParams, tokenizer: TokenizerWrapper | None, vocab_size: int
) -> TokenRules:
    """Check a request's token ids, and encode its bad words.

    Raises:
        ArgumentError: a token id is outside the vocabulary, a text needs a tokenizer and there is
            none, or a bad word has no tokens; the message names the argument.
    """
    stops = ([stop] if isinstance(stop, int) else stop for stop in params.stop_token_ids)
    for name, token_ids in (
        ("logit_bias", params.logit_bias),
        ("allowed_token_ids", params.allowed_token_ids or ()),
        ("stop_token_ids", itertools.chain.from_iterable(stops)),
        ("xtc_special_tokens", params.xtc_special_tokens),
    ):
        _check_in_vocabulary(name, token_ids, vocab_size)
    if tokenizer is None:
        if params.stop:
            raise ArgumentError("[engine] stop texts need a tokenizer; use stop_token_ids", "stop")
        if params.bad_words:
            raise ArgumentError("[engine] bad_words need a tokenizer; use logit_bias", "bad_words")
    if not params.bad_words and not params.min_tokens:
        return NO_RULES
    eos_token_ids: Iterable[int] = () if tokenizer is None else tokenizer.eos_token_ids
    words = [] if tokenizer is None else _bad_words(params.bad_words, tokenizer)
    for word in words:
        _check_in_vocabulary("bad_words", word, vocab_size)
    return TokenRules(
        frozenset(token for token in eos_token_ids if token < vocab_size), tuple(words)
    )


def special_token_ids(tokenizer: TokenizerWrapper | None) -> frozenset[int]:
    """The tokens that ``decode(..., skip_special_tokens=True)`` omits."""
    if tokenizer is None:
        return frozenset()
    # A tokenizer may be third-party code, and lack these attributes.
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {token for token, entry in added.items() if entry.special}
    return frozenset(special.union(getattr(tokenizer, "all_special_ids", ())))


@dataclass(frozen=True)
class LengthLimit:
    """Refuses texts with too many tokens without encoding them as a whole.

    A tokenizer takes about 300 bytes and a microsecond per token of a text, and can't be
    interrupted. So the tokens of a long text are counted first, in pieces. Merges across the cuts
    are lost, so the pieces have slightly more tokens than the whole, about one in ten thousand for
    most texts. A text that exceeds the limit by a quarter is refused; otherwise it is encoded as a
    whole, and the engine decides.

    Args:
        max_model_len: tokens of a prompt and its answer; ``None``: ``MAX_PROMPT_TOKENS``.
        context_length: the largest possible ``max_model_len``, for the error's advice; ``None``:
            no limit.
        check_wanted: called between two pieces; may raise.
    """

    tokenizer: TokenizerWrapper
    max_model_len: int | None
    context_length: int | None
    check_wanted: Callable[[], None]

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
        max_tokens = (self.max_model_len or MAX_PROMPT_TOKENS) * 5 // 4
        num_tokens = num_tokens_before
        for start in range(0, len(text), PIECE_LEN):
            self.check_wanted()
            num_tokens += len(encode_text(self.tokenizer, text[start : start + PIECE_LEN]))
            if num_tokens <= max_tokens:
                continue
            if self.max_model_len is not None:
                words = f"more than {max_tokens}"
                raise prompt_beyond_context(words, self.max_model_len, self.context_length)
            raise PromptTooLongError(
                f"[prompt] it has more than {max_tokens:,} tokens; the server accepts at most "
                f"{MAX_PROMPT_TOKENS:,}"
            )


def _bad_words(texts: Iterable[str], tokenizer: TokenizerWrapper) -> list[tuple[int, ...]]:
    """The tokens of each text, both without and with a space before it.

    vLLM omits the second form if it has a different number of tokens. Here both are banned, since a
    word may be one token after a space and several without it.
    """
    words: dict[tuple[int, ...], None] = {}
    for text in texts:
        name = f"[engine] bad_words has {shown(text)}, which the tokenizer can't encode"
        with _foreign_code(name, "bad_words"):
            forms = [
                tuple(tokenizer.encode(space + text.lstrip(), add_special_tokens=False))
                for space in ("", " ")
            ]
        if not forms[0]:
            raise ArgumentError(
                f"[engine] bad_words has {shown(text)}, for which the tokenizer has no tokens; "
                "leave it out",
                "bad_words",
            )
        words.update((form, None) for form in forms if form)
    return list(words)


def _check_in_vocabulary(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token in token_ids:
        if token >= vocab_size:
            raise ArgumentError(
                f"[engine] {name} has token id {token}, the vocabulary ends at {vocab_size - 1}",
                name,
            )


_NUM_TAIL_TOKENS = 16  # more than those of a mark and white space


class InputProcessor:
    """Makes requests for one model and one tokenizer; from any thread.

    Args:
        seed: of the generator of seeds for requests without one; random if ``None``.

    Attributes:
        token_texts: ``None`` without a tokenizer.
    """

    def __init__(self, tokenizer: TokenizerWrapper | None, model: LanguageModel, seed: int | None):
        vocab_size = model.args.vocab_size
        self.token_texts = None if tokenizer is None else token_texts_of(tokenizer)
        self.special_token_ids = special_token_ids(tokenizer)
        self._tokenizer = tokenizer
        self._model = model
        self._vocab_size = vocab_size
        self._grammars = GrammarCompiler(tokenizer, vocab_size)
        self._seeds = random.Random(seed)

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams | None,
        *,
        priority: int,
        cache_salt: str | None,
        no_store: bool,
        user: str | None,
        adapter: Adapter | None,
        token_rules: TokenRules | None,
    ) -> Request:
        """Make a request; arguments and errors are those of :meth:`Engine.add_request`."""
        request_id = REQUEST_ID.check("engine", "request_id", request_id)
        priority = PRIORITY.check("engine", "priority", priority)
        cache_salt = NAME.check("engine", "cache_salt", cache_salt)
        no_store = BOOL.check("engine", "no_store", no_store)
        user = NAME.check("engine", "user", user)
        params = SamplingParams() if params is None else params
        if isinstance(params, PoolingParams):
            check_pooling(params, self._model)
            text, token_ids = read_prompt(prompt, self._tokenizer, self._vocab_size)
            request = Request(
                request_id,
                token_ids,
                params,
                priority=priority,
                cache_salt=cache_salt,
                no_store=True,
                user=user,
                prompt=text,
            )
            request.adapter = adapter
            return request
        if not isinstance(params, SamplingParams):
            raise ArgumentError(
                f"[engine] params must be SamplingParams, got {type(params).__name__}"
            )
        if token_rules is None:
            token_rules = self.prepare(params)
        text, token_ids = read_prompt(prompt, self._tokenizer, self._vocab_size)
        if params.thinking_token_budget is not None:
            limit = self._reasoning_limit(token_ids, params.thinking_token_budget, token_rules)
            token_rules = token_rules._replace(reasoning=limit)
        for function in (params.sampler, *params.logits_processors):
            evaluate_captured(function)
        request = Request(
            request_id,
            token_ids,
            params,
            seed=self._seeds.getrandbits(63) if params.seed is None else int(params.seed),
            priority=priority,
            cache_salt=cache_salt,
            no_store=no_store,
            user=user,
            token_rules=token_rules,
            prompt=text,
        )
        request.adapter = adapter
        return self.with_texts(request)

    def _reasoning_limit(
        self, token_ids: list[int], num_tokens: int, rules: TokenRules
    ) -> ReasoningLimit | None:
        """The limit of an answer to a prompt; ``None`` for a model whose reasoning has no marks."""
        texts, answer_format = self.token_texts, rules.answer_format
        if self._tokenizer is None or texts is None:
            return None
        if answer_format is None:
            tail = token_ids[-_NUM_TAIL_TOKENS:]
            prompt = str(self._tokenizer.decode(tail, skip_special_tokens=False))
            answer_format = AnswerFormat.of(self._tokenizer, prompt)
        end = Dialect.of(self._tokenizer).reasoning_end
        if not end:
            return None

        def new_reader() -> TokenReader:
            return TokenReader(answer_format, texts.detokenizer(token_ids[-_NUM_TAIL_TOKENS:]))

        return ReasoningLimit(new_reader, end, num_tokens)

    def with_texts(self, request: Request) -> Request:
        """The same request, of whose completions the texts are made if it wants them."""
        params, texts = request.params, self.token_texts
        if texts is None or not params.detokenize:
            return request
        request.texts = texts
        includes_stop = params.include_stop_str_in_output
        request.streams = [
            TextStream(
                texts,
                params.stop,
                prompt_token_ids=request.prompt_token_ids,
                stop_sequences=() if includes_stop else params.stop_sequences,
                min_tokens=params.min_tokens,
                includes_stop=includes_stop,
                skipped_token_ids=self.special_token_ids if params.skip_special_tokens else (),
                answer_format=request.token_rules.answer_format,
            )
            for _ in range(params.n)
        ]
        return request

    def prepare(self, params: SamplingParams) -> TokenRules:
        """The token rules of a request; see :meth:`Engine.prepare`."""
        token_rules = read_token_rules(params, self._tokenizer, self._vocab_size)
        if params.structured_outputs is None:
            return token_rules
        return token_rules._replace(grammar=self._grammars.compile(params.structured_outputs))


def check_pooling(pooling: PoolingParams, model: LanguageModel) -> None:
    """Check what a request is to be answered with instead of tokens.

    Raises:
        ArgumentError: a token id is outside the vocabulary, the embedding has fewer dimensions, or
            the model gives none.
    """
    _check_in_vocabulary("token_ids", pooling.token_ids, model.args.vocab_size)
    if not pooling.is_embedding:
        return
    if not model.hidden_row_size:
        raise ArgumentError(
            f"[engine] this model ({model.description}) gives no embeddings: its last norm can't "
            "be read; use a model whose sequences run packed"
        )
    if (pooling.dimensions or 0) > model.hidden_row_size:
        raise ArgumentError(
            f"[engine] dimensions must be at most {model.hidden_row_size}, the length of this "
            f"model's embeddings, got {pooling.dimensions}",
            "dimensions",
        )


def evaluate_captured(function: Callable[..., Any] | None) -> None:
    """Evaluate the arrays that a function of a request refers to itself: in its closure, its
    defaults, the globals that it names, the arguments of a ``partial``, the attributes of an
    object; and those in lists, tuples and dictionaries there. Arrays of functions and objects that
    it refers to in turn are not found (``lazy_array_error``).

    An engine calls samplers and logits processors in its own thread, and a lazy array belongs to
    the streams of the thread that made it.
    """
    if function is not None:
        mx.eval([array for value in _referred_to(function) for array in _arrays(value)])


def _arrays(value: object) -> Iterator[mx.array]:
    items: Iterable[object] = (value,)
    if isinstance(value, dict):
        items = value.values()
    elif isinstance(value, list | tuple):
        items = value
    return (item for item in items if isinstance(item, mx.array))


def _referred_to(function: Any) -> Iterator[object]:
    if isinstance(function, functools.partial):
        yield from (*function.args, *function.keywords.values())
        yield from _referred_to(function.func)
        return
    if hasattr(function, "__func__"):  # a method
        yield from getattr(function.__self__, "__dict__", {}).values()
        function = function.__func__
    if not hasattr(function, "__code__"):
        yield from getattr(function, "__dict__", {}).values()
        return
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # It is not set yet.
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield from (function.__globals__.get(name) for name in function.__code__.co_names)
