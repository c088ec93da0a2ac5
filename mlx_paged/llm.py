"""`LLM`: many prompts in, their completions out, in order; the offline interface, as vLLM's."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged.engine.engine import Engine, EngineStats, Prompt
from mlx_paged.interrupts import caught_interrupts
from mlx_paged.loading import load
from mlx_paged.memory import wired_limit
from mlx_paged.request import CompletionOutput, RequestOutput, SamplingParams

Message = dict[str, str]

# A list of so many prompts gets a progress bar, where there is a terminal to show it.
LONG_BATCH = 10


class LLM:
    """A model and an :class:`Engine` for it.

        llm = LLM("mlx-community/Qwen3-0.6B-4bit", kv_cache_bytes="2G")
        outputs = llm.generate(["Once upon a time", "The capital of France is"], SamplingParams(max_tokens=50))
        print(outputs[0].outputs[0].text)

    Args:
        model: a local folder, a Hugging Face repo, or a model that is loaded already.
        tokenizer: that of a loaded model.
        adapter_path: LoRA adapters for a model that is loaded here.
        engine_options: ``kv_cache_bytes``, ``max_num_seqs`` and others of :class:`Engine`.

    Raises:
        ValueError: a model that can't be loaded, or a setting out of its range.
    """

    def __init__(
        self,
        model: str | Path | nn.Module,
        tokenizer: TokenizerWrapper | None = None,
        *,
        adapter_path: str | None = None,
        **engine_options: Any,
    ):
        if not isinstance(model, nn.Module):
            model, loaded_tokenizer = load(model, adapter_path=adapter_path)
            tokenizer = tokenizer or loaded_tokenizer
        self.engine = Engine(model, tokenizer, **engine_options)
        self._request_ids = map(str, itertools.count())

    @property
    def tokenizer(self) -> TokenizerWrapper | None:
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts, together; their outputs in the order of the prompts.

        A prompt that fails (empty, too long for the budget, a failing logits processor) fails alone: its output has an
        ``error``, and finish reason ``"error"``.

        Args:
            prompts: texts or lists of token ids; one alone is a list of one.
            sampling_params: for all, or one for each.
            use_tqdm: show a progress bar on stderr; by default for 10 prompts or more, on a terminal.
            priority: one for each; lower runs earlier.

        Raises:
            ValueError: not as many ``sampling_params`` or priorities as prompts.
            KeyboardInterrupt: Ctrl-C, between two steps; the requests are aborted.
        """
        prompts = _as_list_of_prompts(prompts)
        params = sampling_params if isinstance(sampling_params, Sequence) else [sampling_params] * len(prompts)
        priorities = [0] * len(prompts) if priority is None else list(priority)
        for name, values in (("sampling_params", params), ("priority", priorities)):
            if len(values) != len(prompts):
                raise ValueError(f"[generate] {len(values)} {name} for {len(prompts)} prompts; give one for each")
        outputs: dict[str, RequestOutput] = {}
        request_ids = []
        for prompt, prompt_params, prompt_priority in zip(prompts, params, priorities, strict=True):
            request_ids.append(next(self._request_ids))
            try:
                self.engine.add_request(request_ids[-1], prompt, prompt_params, priority=prompt_priority)
            except (ValueError, TypeError, RuntimeError) as error:
                outputs[request_ids[-1]] = _failed(request_ids[-1], prompt, prompt_params, error)
        if use_tqdm is None:
            use_tqdm = len(prompts) >= LONG_BATCH and sys.stderr.isatty()
        self._run(outputs, len(prompts), use_tqdm)
        return [outputs[request_id] for request_id in request_ids]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template_kwargs: dict[str, Any] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """As :meth:`generate`, for one conversation or several, written by the model's chat template.

        Raises:
            ValueError: the tokenizer has no chat template.
        """
        if self.tokenizer is None or not self.tokenizer.has_chat_template:
            raise ValueError("[chat] the model's tokenizer has no chat template; use generate for plain text")
        conversations = [messages] if messages and isinstance(messages[0], dict) else messages
        template_options = chat_template_kwargs or {}
        prompts = [
            self.tokenizer.apply_chat_template(conversation, add_generation_prompt=True, **template_options)
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, **options)

    def stats(self) -> EngineStats:
        """What the pool holds, how often the prefix cache was hit, who runs and waits."""
        return self.engine.stats()

    def _run(self, outputs: dict[str, RequestOutput], num_requests: int, use_tqdm: bool) -> None:
        from tqdm import tqdm

        engine = self.engine
        num_tokens = 0
        with (
            tqdm(total=num_requests, initial=len(outputs), unit="prompt", disable=not use_tqdm) as bar,
            wired_limit(engine.model),
            caught_interrupts(second=KeyboardInterrupt()) as interrupted,
        ):
            try:
                while engine.has_unfinished_requests():
                    for output in engine.step():
                        if output.finished:
                            outputs[output.request_id] = output
                            num_tokens += sum(len(completion.token_ids) for completion in output.outputs)
                            bar.set_postfix_str(f"{num_tokens / max(1e-9, bar.format_dict['elapsed']):.1f} tok/s")
                            bar.update()
                    if interrupted:
                        engine.abort_all()
            except BaseException:
                # Of a step that was cut: the next batch is not to go on with these.
                engine.abort_all()
                engine.step()
                raise
        if interrupted:
            raise KeyboardInterrupt


def _as_list_of_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    prompts = prompts.tolist() if hasattr(prompts, "tolist") else list(prompts)
    return [prompts] if prompts and all(isinstance(token, int) for token in prompts) else prompts


def _failed(request_id: str, prompt: Prompt, params: SamplingParams | None, error: Exception) -> RequestOutput:
    is_text = isinstance(prompt, str)
    token_ids = [] if is_text or not isinstance(prompt, Sequence) else list(prompt)
    num_completions = params.n if isinstance(params, SamplingParams) else 1
    completions = [CompletionOutput(index, finish_reason="error") for index in range(num_completions)]
    # With its traceback it would keep the engine as long as somebody keeps the output.
    error = error.with_traceback(None)
    return RequestOutput(request_id, prompt if is_text else None, token_ids, completions, finished=True, error=error)
