"""``InputProcessor``: checks the arguments of users and makes requests from them."""

from __future__ import annotations

import random

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged.answers.dialect import AnswerFormat, Dialect
from mlx_paged.answers.tokens import ReasoningLimit, TokenReader
from mlx_paged.domains import BOOL
from mlx_paged.engine.callers_thread import evaluate_captured
from mlx_paged.engine.grammar import GrammarCompiler
from mlx_paged.engine.prompts import Prompt, read_prompt
from mlx_paged.engine.request import Request, TokenRules
from mlx_paged.engine.text_stream import TextStream
from mlx_paged.engine.token_rules import read_token_rules, special_token_ids
from mlx_paged.engine.token_texts import TokenTexts
from mlx_paged.errors import ArgumentError
from mlx_paged.request import PRIORITY, REQUEST_ID, check_cache_salt, check_user
from mlx_paged.sampling_params import SamplingParams

_NUM_TAIL_TOKENS = 16  # more than those of a mark and white space


class InputProcessor:
    """Makes requests for one model and one tokenizer; from any thread.

    Args:
        seed: of the generator of seeds for requests without one; random if ``None``.

    Attributes:
        token_texts: ``None`` without a tokenizer.
    """

    def __init__(self, tokenizer: TokenizerWrapper | None, vocab_size: int, seed: int | None):
        self.token_texts = None if tokenizer is None else TokenTexts(tokenizer)
        self.special_token_ids = special_token_ids(tokenizer)
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._grammars = GrammarCompiler(tokenizer, vocab_size)
        self._seeds = random.Random(seed)

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None,
        *,
        priority: int,
        cache_salt: str | None,
        no_store: bool,
        user: str | None,
        token_rules: TokenRules | None,
    ) -> Request:
        """Make a request; arguments and errors are those of :meth:`Engine.add_request`."""
        request_id = REQUEST_ID.check("engine", "request_id", request_id)
        priority = PRIORITY.check("engine", "priority", priority)
        cache_salt = check_cache_salt(cache_salt)
        no_store = BOOL.check("engine", "no_store", no_store)
        user = check_user(user)
        params = SamplingParams() if params is None else params
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
