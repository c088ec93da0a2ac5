"""``LLM``: completes many prompts, in order; the offline interface, as vLLM's."""

from __future__ import annotations

import itertools
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar, Unpack

from mlx.nn.layers.base import Module
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged.answers.chat_template import NO_TEMPLATE, encode_chat
from mlx_paged.block_store.worker import SECONDS_AT_EXIT
from mlx_paged.distributed import launched_ranks
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.input_processor import Prompt, split_prompts
from mlx_paged.engine.stats import EngineStats
from mlx_paged.engine.thread import run_in_engine_thread
from mlx_paged.errors import (
    ArgumentError,
    ChatTemplateError,
    EngineStoppedError,
    forget_frames,
    shown,
)
from mlx_paged.loading import load_draft_model, load_for
from mlx_paged.loading.pooling import read_embedder, read_reranker, score_of
from mlx_paged.models.adapters import Adapter
from mlx_paged.options.argument_values import (
    BOOL,
    Domain,
    is_sequence,
    kind_of,
    matching,
    or_none,
    whole,
)
from mlx_paged.options.engine_options import EngineOptions
from mlx_paged.options.foreign_arguments import NoOptions, refuse_unknown
from mlx_paged.options.sampling_params import (
    TASK,
    PoolingParams,
    RequestOutputKind,
    SamplingParams,
    Task,
)
from mlx_paged.request import (
    NAME,
    CompletionOutput,
    EmbeddingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
)

# Batches with at least this many prompts show a progress bar, on a terminal or in a notebook.
LONG_BATCH = 10

Message = Mapping[str, Any]
P = TypeVar("P")


class _PromptRequest(NamedTuple):
    """A prompt, or the error of one that failed before, and its other arguments."""

    prompt: Prompt | Exception
    params: SamplingParams | PoolingParams | None
    priority: int = 0
    no_store: bool = False
    adapter: str | None = None


class LLM:
    """A model and an :class:`Engine` for it::

        llm = LLM("mlx-community/Qwen3-0.6B-4bit", kv_cache_bytes="2G")
        prompts = ["Once upon a time", "The capital of France is"]
        outputs = llm.generate(prompts, SamplingParams(max_tokens=50))
        print(outputs[0].outputs[0].text)

    Several threads may call :meth:`generate` and :meth:`chat`; their batches run one after the
    other. :class:`mlx_paged.AsyncEngine` batches the requests of all threads together.

    Leaving a ``with LLM(...) as llm:`` block closes it (:meth:`close`).

    In a script that ``mlx.launch`` runs on several ranks, a model that is loaded here is split over
    them. All ranks must make the same calls in the same order, from one thread; they use the
    arguments of rank 0, and return its outputs.

    Args:
        model: a local folder, a Hugging Face repo, a GGUF file, or a model that
            :func:`mlx_paged.load` or ``mlx_lm.load`` returned; ``demo`` is the bundled one.
        tokenizer: of a loaded model.
        adapter_path: LoRA adapters for a model that is loaded here.
        tokenizer_path: a folder or a repo with the tokenizer for a model that is loaded here,
            instead of the model's own.
        skip_check: run a model or a draft model that is loaded here even if the check at load
            refuses it; see :func:`mlx_paged.load`.
        task: what a model whose files don't say it is for: ``"score"`` for a Qwen3-Reranker under
            another name. Any model that gives hidden rows takes :meth:`embed`.
        draft_model: a small model with the same tokenizer, or a head of the model, that generates
            drafts: a folder, a hub id, a loaded model, or ``"auto"`` for the head in the model's
            own folder; see :class:`Engine`.
        engine_options: ``kv_cache_bytes``, ``max_num_seqs`` and others of :class:`Engine`.

    Raises:
        ValueError: a model that can't be loaded, or a setting out of its range.
        TypeError: an unknown argument; the message says what to use instead.
    """

    def __init__(
        self,
        model: str | Path | Module = "demo",
        tokenizer: TokenizerWrapper | None = None,
        *,
        adapter_path: str | Path | None = None,
        tokenizer_path: str | Path | None = None,
        skip_check: bool = False,
        draft_model: str | Path | Module | None = None,
        task: Task | None = None,
        **engine_options: Unpack[EngineOptions],
    ):
        refuse_unknown(LLM, engine_options, EngineOptions.__annotations__)
        if isinstance(tokenizer, (str, Path)):
            raise ValueError(
                f"[llm] tokenizer must be a tokenizer, got {shown(tokenizer)}; leave it out for "
                "the model's own, or use tokenizer_path"
            )
        if isinstance(model, Module):
            for name, value in (("adapter_path", adapter_path), ("tokenizer_path", tokenizer_path)):
                if value is not None:
                    raise ValueError(
                        f"[llm] {name} is for a model that is loaded here; give it to load"
                    )
        else:
            if not isinstance(model, (str, Path)):
                raise ValueError(
                    "[llm] model must be a folder, a hub id or a model that is loaded, got "
                    f"{kind_of(model)}"
                )
            load = partial(
                load_for,
                launched_ranks(),
                model,
                adapter_path=adapter_path,
                tokenizer_path=tokenizer_path,
                skip_check=skip_check,
                engine_options=engine_options,
            )
            model, loaded_tokenizer = run_in_engine_thread(load)
            tokenizer = tokenizer or loaded_tokenizer
        loaded = load_draft_model(draft_model, tokenizer, model, skip_check=skip_check)
        self.engine = Engine(model, tokenizer, draft_model=loaded, **engine_options)
        self._task = TASK.check("llm", "task", task)
        self._request_ids = map(str, itertools.count())
        self._turn = threading.Lock()

    def __repr__(self) -> str:
        return f"LLM({self.engine!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self, timeout: float = SECONDS_AT_EXIT) -> bool:
        """Close the engine (:meth:`Engine.close`) and end its thread; returns whether all blocks
        for ``cache_dir`` were written. Later calls raise ``EngineStoppedError``. Can be called more
        than once, and need not be called at all: the end of the object or of Python does the same.
        """
        is_written = self.engine.close(timeout)
        self.engine.thread.end()
        return is_written

    @property
    def tokenizer(self) -> TokenizerWrapper | None:
        return self.engine.tokenizer

    def get_tokenizer(self) -> TokenizerWrapper:
        """The tokenizer, in mlx-lm's wrapper, which has all attributes of transformers' own.

        Raises:
            ValueError: there is no tokenizer.
        """
        if self.tokenizer is None:
            raise ValueError("[llm] there is no tokenizer; give one to LLM(model, tokenizer)")
        return self.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        use_tqdm: bool | None = None,
        priority: Sequence[int] | None = None,
        no_store: bool | Sequence[bool] = False,
        adapter: str | Sequence[str | None] | None = None,
        raise_on_error: bool = True,
        **unknown: Unpack[NoOptions],
    ) -> list[RequestOutput]:
        """Complete prompts as one batch; returns the outputs in the order of the prompts.

        Args:
            prompts: texts, token ids, or vLLM's dicts ``{"prompt": text}`` and
                ``{"prompt_token_ids": ids}``. A single prompt is a list of one, and a sequence that
                begins with a number is a single prompt.
            sampling_params: for all, or one for each; ``None`` is greedy.
            use_tqdm: show a progress bar: a widget in a notebook with ipywidgets, else a line on
                stderr; by default for 10 prompts or more, on a terminal or in a notebook.
            priority: one for each: a lower one is admitted earlier, and may preempt others.
            no_store: for all, or one for each; see :meth:`Engine.add_request`.
            adapter: the name of a loaded adapter for all, or one or ``None`` for each.
            raise_on_error: whether a prompt that fails (empty, too long, an invalid grammar, a
                failing logits processor) ends the call with its error. If False, the prompt's
                output has the ``error`` and finish reason ``"error"``, and the other prompts are
                answered.

        Raises:
            ValueError: an argument of the wrong type, or a list of ``sampling_params``, priorities,
                ``no_store`` or adapters whose length is not the number of prompts.
            Exception: the error of a prompt, raised before anything is computed if it can be
                known then. The other prompts are aborted, and a note of the error says which prompt
                failed.
            EngineStoppedError: the engine was stopped by a failure.
            RuntimeError: the call comes from inside another one, such as from a logits processor.
            KeyboardInterrupt: Ctrl-C, at once; the requests end with the running step.
        """

        if unknown:
            refuse_unknown(LLM.generate, unknown)

        def read() -> Sequence[_PromptRequest]:
            return _requests_of(
                split_prompts(prompts), sampling_params, priority, no_store, adapter
            )

        return self.engine.share(partial(self._complete, read, use_tqdm, raise_on_error))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool | None = None,
        priority: Sequence[int] | None = None,
        no_store: bool | Sequence[bool] = False,
        adapter: str | Sequence[str | None] | None = None,
        raise_on_error: bool = True,
        **unknown: Unpack[NoOptions],
    ) -> list[RequestOutput]:
        """Answer one or several conversations, rendered by the model's chat template.

        A conversation with invalid messages, or that the template rejects, is a prompt that fails.

        Args:
            messages: one conversation, a list of messages, or a list of conversations; a message
                has a ``role`` and a ``content``: text, or a list of text parts.
            chat_template_kwargs: variables of the template, such as ``enable_thinking`` or
                ``tools``.

        Other arguments, and the errors raised, are those of :meth:`generate`.

        Raises:
            ValueError: the tokenizer has no chat template.
        """

        if unknown:
            refuse_unknown(LLM.chat, unknown)

        def read() -> Sequence[_PromptRequest]:
            prompts = self._rendered(messages, checked_template_options(chat_template_kwargs))
            return _requests_of(prompts, sampling_params, priority, no_store, adapter)

        return self.engine.share(partial(self._complete, read, use_tqdm, raise_on_error))

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        dimensions: int | None = None,
        *,
        prompt_name: str | None = None,
        adapter: str | None = None,
        use_tqdm: bool | None = None,
        **unknown: Unpack[NoOptions],
    ) -> list[PoolingRequestOutput[EmbeddingOutput]]:
        """Embed prompts as one batch; returns the outputs in the order of the prompts.

        An embedding is the hidden row of the last token, with length 1 unless the model's folder
        says otherwise. Any model whose sequences run packed has one; those of a model that was not
        trained for it say little of a text.

        Args:
            prompts: as of :meth:`generate`. Texts get the end token of an embedder; token ids are
                taken as they are.
            dimensions: how many numbers of each embedding, the first ones, are kept before it is
                normalised; ``None`` for all.
            prompt_name: a prompt of the model's ``config_sentence_transformers.json`` that is put
                before each text, such as ``"query"``; by default what the file says, and ``""`` for
                none.
            adapter: the name of a loaded adapter.
            use_tqdm: as of :meth:`generate`.

        Raises:
            ValueError: the model gives no embeddings, an argument is out of its range, or a prompt
                is empty or too long.
            EngineStoppedError, RuntimeError, KeyboardInterrupt: as :meth:`generate`.
        """
        if unknown:
            refuse_unknown(LLM.embed, unknown)

        def read() -> Sequence[_PromptRequest]:
            embedder = read_embedder(self.engine.runner.model, self.tokenizer)
            params, before = embedder.params(dimensions), embedder.text_before(prompt_name)
            given = split_prompts(prompts)
            return [
                _PromptRequest(embedder.prompt(each, before), params, adapter=adapter)
                for each in given
            ]

        outputs = self.engine.share(partial(self._complete, read, use_tqdm, True))
        return [_pooled(output, EmbeddingOutput(output.pooled or [])) for output in outputs]

    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        /,
        *,
        instruction: str | None = None,
        adapter: str | None = None,
        use_tqdm: bool | None = None,
        **unknown: Unpack[NoOptions],
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        """Score documents with a Qwen3-Reranker: from 0 to 1, how well each answers its query.

        Args:
            queries: one for all documents, or one for each.
            instruction: what makes a document relevant; by default, for a web search.
            adapter: the name of a loaded adapter.
            use_tqdm: as of :meth:`generate`.

        Raises:
            ValueError: the model is not a Qwen3-Reranker, an argument has another type, or a prompt
                is too long.
            EngineStoppedError, RuntimeError, KeyboardInterrupt: as :meth:`generate`.
        """
        if unknown:
            refuse_unknown(LLM.score, unknown)

        def read() -> Sequence[_PromptRequest]:
            model, is_declared = self.engine.runner.model, self._task == "score"
            reranker = read_reranker(model, self.tokenizer, is_declared)
            requests = reranker.requests(queries, documents, instruction)
            return [_PromptRequest(*each, adapter=adapter) for each in requests]

        outputs = self.engine.share(partial(self._complete, read, use_tqdm, True))
        return [_pooled(each, ScoringOutput(score_of(each.pooled or []))) for each in outputs]

    def load_adapter(self, name: str, folder: str | Path) -> Adapter:
        """Load a LoRA adapter; see :meth:`Engine.load_adapter`."""
        return self.engine.load_adapter(name, folder)

    def unload_adapter(self, name: str) -> None:
        """Refuse further requests for an adapter; see :meth:`Engine.unload_adapter`."""
        self.engine.unload_adapter(name)

    def stats(self) -> EngineStats:
        """Statistics of the K/V pool, the prefix cache, and running and waiting requests."""
        return self.engine.stats()

    def _rendered(
        self, messages: object, template_options: Mapping[str, Any]
    ) -> list[Prompt | Exception]:
        tokenizer = self.tokenizer
        if tokenizer is None or not tokenizer.has_chat_template:
            raise ChatTemplateError(NO_TEMPLATE)
        return [
            _render(tokenizer, each, template_options) for each in split_conversations(messages)
        ]

    def _checked(self, num_prompts: int, use_tqdm: object) -> bool:
        """Whether to show a progress bar."""
        if use_tqdm is None:
            use_tqdm = num_prompts >= LONG_BATCH and (sys.stderr.isatty() or _is_notebook())
        if not isinstance(use_tqdm, bool):
            raise ValueError(
                f"[generate] use_tqdm must be True, False or None, got {shown(use_tqdm)}"
            )
        if self.engine.thread.is_current:
            raise RuntimeError(
                "[generate] it was called from inside a call of the same LLM; create a second LLM "
                "for that"
            )
        return use_tqdm

    def _complete(
        self, read: Callable[[], Sequence[_PromptRequest]], use_tqdm: object, raise_on_error: object
    ) -> list[RequestOutput]:
        self.engine.thread.check_process()  # In a child, the turn may never come.
        prompts = read()
        shows_progress = self._checked(len(prompts), use_tqdm)
        raises = BOOL.check("generate", "raise_on_error", raise_on_error)
        requests = dict(zip(self._request_ids, prompts, strict=False))
        outputs: dict[str, RequestOutput] = {}
        num_tokens = 0
        bar = _progress_bar(len(requests), shows_progress)
        with self._turn, bar:
            try:
                for request_id, each in requests.items():
                    try:
                        if isinstance(each.prompt, Exception):
                            raise each.prompt
                        self.engine.add_request(
                            request_id,
                            each.prompt,
                            each.params,
                            priority=each.priority,
                            no_store=each.no_store,
                            adapter=each.adapter,
                        )
                    except EngineStoppedError:
                        raise  # No prompt caused it.
                    except (ValueError, TypeError, RuntimeError) as error:
                        outputs[request_id] = _failed(error, request_id, requests, raises)
                bar.update(len(outputs))
                while len(outputs) < len(requests):
                    for output in self.engine.step():
                        if output.finished and output.request_id in requests:
                            if raises:
                                _raise_if_failed(output, requests)
                            outputs[output.request_id] = output
                            num_tokens += sum(len(one.token_ids) for one in output.outputs)
                            num_tokens += len(output.prompt_token_ids if output.pooled else ())
                            seconds = max(1e-9, bar.format_dict["elapsed"])
                            bar.set_postfix_str(f"{num_tokens / seconds:.1f} tok/s")
                            bar.update()
            except BaseException:
                # The next batch must not continue these requests.
                self.engine.drop(requests)
                raise
        return [outputs[request_id] for request_id in requests]


def _pooled(output: RequestOutput, pooled: P) -> PoolingRequestOutput[P]:
    return PoolingRequestOutput(
        output.request_id, pooled, output.prompt_token_ids, output.num_cached_tokens
    )


def _is_notebook() -> bool:
    """Whether this runs in a Jupyter kernel, which shows stderr although it is not a terminal."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and "IPKernelApp" in shell.config


def _progress_bar(num_prompts: int, is_shown: bool) -> Any:
    with warnings.catch_warnings():
        # In a notebook without ipywidgets, tqdm recommends to install them.
        warnings.simplefilter("ignore")
        from tqdm.auto import tqdm
    return tqdm(total=num_prompts, unit="prompt", disable=not is_shown)


def _requests_of(
    prompts: Sequence[Prompt | Exception],
    sampling_params: object,
    priority: object,
    no_store: object,
    adapter: object,
) -> list[_PromptRequest]:
    """The arguments of a call, by prompt; an exception stands for a prompt that failed before."""
    num_prompts = len(prompts)
    all_params = one_for_each("sampling_params", sampling_params, num_prompts)
    return list(
        map(
            _PromptRequest,
            prompts,
            map(_with_whole_outputs, all_params),
            one_for_each("priority", priority, num_prompts),
            one_for_each("no_store", no_store, num_prompts),
            one_for_each("adapter", adapter, num_prompts),
        )
    )


def _with_whole_outputs(params: SamplingParams | None) -> SamplingParams | None:
    """The parameters of a prompt, whose output is returned once."""
    if params is not None and params.output_kind is RequestOutputKind.DELTA:
        return params.clone(output_kind=RequestOutputKind.FINAL_ONLY)
    return params


def _render(
    tokenizer: TokenizerWrapper, conversation: Any, template_options: Mapping[str, Any]
) -> Prompt | ChatTemplateError:
    """The prompt of a conversation with its text, or the error of its messages."""
    try:
        text, token_ids = encode_chat(tokenizer, conversation, template_options)
    except ChatTemplateError as error:
        return error
    return {"prompt": text, "prompt_token_ids": token_ids}


def _raise_if_failed(output: RequestOutput, requests: Collection[str]) -> None:
    try:
        output.raise_if_failed()
    except Exception as error:
        _say_which(error, output.request_id, requests)
        raise


def _say_which(error: Exception, request_id: str, requests: Collection[str]) -> None:
    """Add a note that says which of several prompts failed, and how to get the other answers."""
    num_prompts, number = len(requests), list(requests).index(request_id) + 1
    if num_prompts > 1:
        error.add_note(
            f"Prompt {number} of {num_prompts} failed; with raise_on_error=False its output holds "
            "the error, and the others are answered."
        )


def _failed(
    error: Exception, request_id: str, requests: Mapping[str, _PromptRequest], raises: bool
) -> RequestOutput:
    """The output of a prompt that failed; raises the error if the call is to end with it."""
    if raises:
        _say_which(error, request_id, requests)
        raise error
    request = requests[request_id]
    text, token_ids = _as_given(request.prompt)
    num_completions = request.params.n if isinstance(request.params, SamplingParams) else 1
    completions = [
        CompletionOutput(index, finish_reason="error") for index in range(num_completions)
    ]
    forget_frames(error)
    return RequestOutput(request_id, text, token_ids, completions, finished=True, error=error)


def _as_given(prompt: object) -> tuple[str | None, list[int]]:
    """The text and the token ids of a prompt that failed, as far as it has them."""
    text = token_ids = prompt
    if isinstance(prompt, Mapping):
        text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    given = list(token_ids) if isinstance(token_ids, (list, tuple)) else []
    return text if isinstance(text, str) else None, given


# Arguments of a call, some of which have one value or one for each prompt: the domain of each
# value, and a description of the whole argument.
_EACH: dict[str, tuple[Domain[Any], str]] = {
    "sampling_params": (
        or_none(
            matching("SamplingParams", lambda value: isinstance(value, SamplingParams)),
            "SamplingParams",
        ),
        "SamplingParams, one for all or a list with one for each prompt",
    ),
    "priority": (whole(), "a list with a whole number for each prompt"),
    "no_store": (BOOL, "True or False, for all or a list with one for each prompt"),
    "adapter": (NAME, "a name, for all or a list with one for each prompt"),
}
# These are arguments of the functions that render a template, and not variables of it.
_NO_VARIABLES = {
    "tokenizer", "messages", "conversation", "tokenize", "return_dict", "return_tensors",
    "chat_template",
}  # fmt: skip


def one_for_each(name: str, given: object, num_prompts: int) -> list[Any]:
    """A value for each prompt: ``given`` is a list of them, or one (or ``None``) for all.

    Raises:
        ValueError: the list has another length, or a value is invalid.
    """
    domain, what = _EACH[name]
    is_one = isinstance(given, str) and name == "adapter"
    if given is None or is_one or isinstance(given, SamplingParams | bool):
        default = 0 if name == "priority" and given is None else given
        return [_checked(domain, name, default)] * num_prompts
    tolist = getattr(given, "tolist", None)
    values = tolist() if callable(tolist) else given
    if not is_sequence(values):
        raise ValueError(f"[generate] {name} must be {what}, got {shown(given)} ({kind_of(given)})")
    if len(values) != num_prompts:
        raise ValueError(
            f"[generate] {len(values)} {name} for {num_prompts} prompts; give one for each"
        )
    return [_checked(domain, f"{name}[{index}]", value) for index, value in enumerate(values)]


def _checked(domain: Domain[Any], name: str, value: object) -> Any:
    try:
        return domain.check("generate", name, value)
    except ArgumentError as error:
        is_params = name.startswith("sampling_params") and isinstance(value, Mapping)
        way_out = "; write SamplingParams(**...)" if is_params else ""
        raise ValueError(f"{error} ({kind_of(value)}){way_out}") from None


def split_conversations(messages: object) -> list[Any]:
    """The conversations of a call: a list that begins with a message is one, a list of lists is
    several.
    """
    if isinstance(messages, Mapping):
        raise ValueError(
            "[chat] messages must be a list of messages, got one message; write [message]"
        )
    if not is_sequence(messages):
        raise ValueError(
            "[chat] messages must be a list of messages or a list of such lists, got "
            f"{kind_of(messages)}; use generate for plain text"
        )
    if not messages or is_sequence(messages[0]):
        return list(messages)
    if not isinstance(messages[0], Mapping):
        raise ValueError(
            "[chat] messages[0] must be a message such as {'role': 'user', 'content': 'Hello'}, "
            f"or a list of them, got {kind_of(messages[0])}"
        )
    return [messages]


def checked_template_options(options: object) -> Mapping[str, Any]:
    if options is None:
        return {}
    if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
        raise ValueError(
            "[chat] chat_template_kwargs must be a dict of the template's variables, got "
            f"{shown(options)}"
        )
    for name in sorted(_NO_VARIABLES.intersection(options)):
        raise ValueError(
            f"[chat] chat_template_kwargs[{name!r}] is not a template variable; leave it out"
        )
    return options
