"""An adapter of the suite ``canitoolcall`` for ``AnswerReader``.

The suite has the tokens of its answers, and no tokenizer. The ids of control tokens are listed
here; the text between two of them is shared out among the other tokens there, at random places. So
a mark that an answer spells out is text here as well.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any

from canitoolcall.adapters.base import Adapter, ReplayInput, Support
from canitoolcall.results import ParseResult, StreamAccumulator

from mlx_paged.answers.dialect import AnswerFormat, Dialect
from mlx_paged.answers.formats import REASONING, format_named
from mlx_paged.answers.reader import AnswerReader
from mlx_paged.request import CompletionOutput


def numbered(first: int, *texts: str) -> dict[str, int]:
    return {text: first + index for index, text in enumerate(texts)}


CALL = ("<tool_call>", "</tool_call>")
THINK = ("<think>", "</think>")
QWEN3 = numbered(151657, *CALL) | numbered(151667, *THINK)
QWEN35 = numbered(248058, *CALL) | numbered(248068, *THINK)
GLM_ARGUMENTS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
GLM = numbered(151350, *THINK, *CALL) | numbered(151356, *GLM_ARGUMENTS)
GLM5 = numbered(154841, *THINK, *CALL) | numbered(154847, *GLM_ARGUMENTS)
DEEPSEEK = numbered(
    128806, "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
) | {"<｜tool▁sep｜>": 128814}  # fmt: skip
MISTRAL = {"[TOOL_CALLS]": 9}
TEKKEN = MISTRAL | numbered(32, "[ARGS]", "[CALL_ID]")
MAGISTRAL = TEKKEN | numbered(34, "[THINK]", "[/THINK]")
KIMI_K2 = numbered(
    163595, "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>", "<|tool_call_end|>",
)  # fmt: skip
# The format of calls, the first mark of reasoning, and the control tokens, by the reference model.
MODELS: dict[str, tuple[str, str, dict[str, int]]] = {
    "Qwen/Qwen3-0.6B": ("json_tools", "<think>", QWEN3),
    "Qwen/Qwen3-4B-Instruct-2507": ("json_tools", "", QWEN3),
    "Qwen/Qwen3-4B-Thinking-2507": ("json_tools", "<think>", QWEN3),
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": ("qwen3_coder", "", QWEN3),
    "Qwen/Qwen3-Coder-Next": ("qwen3_coder", "", QWEN3),
    "Qwen/Qwen3.5-9B": ("qwen3_coder", "<think>", QWEN35),
    "Qwen/Qwen3.8-27B": ("qwen3_coder", "<think>", QWEN35),
    "google/gemma-4-31B-it": (
        "gemma4", "<|channel>thought",
        numbered(48, "<|tool_call>", "<tool_call|>") | {'<|"|>': 52}
        | numbered(100, "<|channel>", "<channel|>"),
    ),
    "zai-org/GLM-4.5": ("glm47", "<think>", GLM),
    "zai-org/GLM-4.7": ("glm47", "<think>", GLM),
    "zai-org/GLM-5.3": ("glm47", "<think>", GLM5),
    "openai/gpt-oss-20b": (
        "harmony", "<|channel|>analysis<|message|>",
        {"<|return|>": 200002, "<|constrain|>": 200003, "<|channel|>": 200005, "<|start|>": 200006,
         "<|end|>": 200007, "<|message|>": 200008, "<|call|>": 200012},
    ),
    "moonshotai/Kimi-K2-Instruct-0905": ("kimi_k2", "", KIMI_K2),
    "moonshotai/Kimi-K2.6": ("kimi_k2", "<think>", KIMI_K2 | numbered(163606, *THINK)),
    "moonshotai/Kimi-K3": (
        "kimi_k3", "<|open|>think<|sep|>", numbered(163587, "<|open|>", "<|close|>", "<|sep|>")
    ),
    "meta-llama/Llama-3.3-70B-Instruct": ("llama3", "", {"<|python_tag|>": 128010}),
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": (
        "llama4", "", numbered(200016, "<|python_start|>", "<|python_end|>")
    ),
    "mistralai/Mistral-7B-Instruct-v0.3": ("mistral", "", {"[TOOL_CALLS]": 5}),
    "mistralai/Mistral-Small-3.2-24B-Instruct-2506": ("mistral", "", TEKKEN),
    "mistralai/Devstral-Small-2507": ("mistral", "", TEKKEN),
    "mistralai/Devstral-Small-2-24B-Instruct-2512": ("mistral", "", TEKKEN),
    "mistralai/Magistral-Small-2506": ("mistral", "<think>", TEKKEN),  # spelled out
    "mistralai/Magistral-Small-2509": ("mistral", "[THINK]", MAGISTRAL),
    "mistralai/Ministral-3-14B-Instruct-2512": ("mistral", "", TEKKEN),
    "mistralai/Ministral-3-14B-Reasoning-2512": ("mistral", "[THINK]", MAGISTRAL),
    "mistralai/Mistral-Small-4-119B-2603": ("mistral", "[THINK]", MAGISTRAL),
    "mistralai/Mistral-Medium-3.5-128B": ("mistral", "[THINK]", MAGISTRAL),
    "deepseek-ai/DeepSeek-V3-0324": ("deepseek_v3", "", DEEPSEEK),
    "deepseek-ai/DeepSeek-V3.1": ("deepseek_v3", "<think>", DEEPSEEK | numbered(128798, *THINK)),
    "deepseek-ai/DeepSeek-V3.2": (
        "deepseek_v3_2", "<think>", {"｜DSML｜": 128793} | numbered(128798, *THINK)
    ),
    "deepseek-ai/DeepSeek-V4-Flash": (
        "deepseek_v4", "<think>", {"｜DSML｜": 128825} | numbered(128821, *THINK)
    ),
    "deepseek-ai/DeepSeek-V4.1-Flash": (
        "deepseek_v4_1", "<think>", {"｜DSML｜": 128825} | numbered(128821, *THINK)
    ),
}  # fmt: skip


@cache
def dialect_of(model: str) -> Dialect:
    calls, start, token_ids = MODELS[model]
    reasoning = next((each for each in REASONING if each.start == start), None)
    return Dialect.of_tokens(
        format_named(calls), reasoning, {text: (token, True) for text, token in token_ids.items()}
    )


def shared_out(text: str, count: int, rng: random.Random) -> list[str]:
    """A text in as many pieces."""
    places = sorted(rng.choices(range(len(text) + 1), k=count - 1)) if count else []
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def texts_of(text: str, token_ids: Sequence[int], marks: Mapping[int, str]) -> list[str]:
    """The text of each token. Where a mark is both a token and spelled out, the pieces between are
    to have lengths that fit their numbers of tokens.
    """
    names = [marks[token] for token in token_ids if token in marks]
    runs = [0]  # the numbers of other tokens before, between and after the control tokens
    for token in token_ids:
        if token in marks:
            runs.append(0)
        else:
            runs[-1] += 1

    def fit(count: int, length: int) -> float:
        return 1e9 if bool(count) != bool(length) else abs(length / 3.5 - count)

    # For each number of marks, the ends of the text before it, and the best way to each of them.
    ways: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for name, run in zip(names, runs, strict=False):
        found: dict[int, tuple[float, list[int]]] = {}
        for begin, (cost, places) in ways.items():
            place = text.find(name, begin)
            while place >= 0:
                way = (cost + fit(run, place - begin), [*places, place])
                end = place + len(name)
                found[end] = min(found.get(end, way), way)
                place = text.find(name, place + 1)
        ways = found
    _, places = min(
        (cost + fit(runs[-1], len(text) - begin), places) for begin, (cost, places) in ways.items()
    )
    rng, pieces, begin, inner = random.Random(text), [], 0, iter(range(len(names)))
    segments = []
    for index in inner:
        segments.append(text[begin : places[index]])
        begin = places[index] + len(names[index])
    segments.append(text[begin:])
    for index, segment in enumerate(segments):
        if runs[index]:
            pieces += shared_out(segment, runs[index], rng)
        if index < len(names):
            pieces.append(names[index])
    assert "".join(pieces) == text and len(pieces) == len(token_ids)
    return pieces


class MlxPaged(Adapter):
    name = "mlx-paged"
    pinned_version = "0"
    supports_text_deltas = True

    def version(self) -> str:
        return "0"

    def supports(self, family: str, model: str) -> Support:
        return Support(model in MODELS)

    def parser_config(self, raw: ReplayInput) -> dict[str, Any]:
        return {"format": MODELS[raw.model][0]}

    def units(self, raw: ReplayInput) -> list[int]:
        assert raw.token_ids is not None
        return list(raw.token_ids)

    def special_token_ids(self, raw: ReplayInput) -> Collection[int]:
        return set(MODELS[raw.model][2].values())

    def parse(self, raw: ReplayInput, tools: Sequence[Mapping[str, Any]]) -> ParseResult:
        return self.parse_stream(raw, [self.units(raw)], tools)

    def parse_stream(
        self,
        raw: ReplayInput,
        chunks: Sequence[Sequence[int]],
        tools: Sequence[Mapping[str, Any]],
    ) -> ParseResult:
        characters = dialect_of(raw.model).marks.characters
        pieces = iter(self.pieces(raw))
        texts = []
        for chunk in chunks:
            shown = [(next(pieces), characters.get(token)) for token in chunk]
            texts.append("".join(character or text for text, character in shown))
        return self.read(raw, texts, tools)

    def parse_stream_text(
        self, raw: ReplayInput, deltas: Sequence[str], tools: Sequence[Mapping[str, Any]]
    ) -> ParseResult:
        """The same characters in other pieces."""
        whole = self.encoded(raw)
        places, texts = 0, []
        for delta in deltas:
            texts.append(whole[places : places + len(delta)])
            places += len(delta)
        return self.read(raw, texts, tools)

    def pieces(self, raw: ReplayInput) -> list[str]:
        marks = {token: text for text, token in MODELS[raw.model][2].items()}
        return texts_of(raw.text, self.units(raw), marks)

    def encoded(self, raw: ReplayInput) -> str:
        characters = dialect_of(raw.model).marks.characters
        shown = zip(self.pieces(raw), self.units(raw), strict=True)
        return "".join(characters.get(token, text) for text, token in shown)

    def read(
        self, raw: ReplayInput, texts: Sequence[str], tools: Sequence[Mapping[str, Any]]
    ) -> ParseResult:
        dialect, prompt = dialect_of(raw.model), raw.generation_prompt or ""
        reader = AnswerReader(AnswerFormat.for_prompt(dialect, prompt, tools))
        told = StreamAccumulator()
        reason = "length" if raw.truncated else "stop"
        parts = [CompletionOutput(0, text) for text in texts]
        for part in [*parts, CompletionOutput(0, "", finish_reason=reason)]:
            for kind, text, call in reader.read(part):
                if call is not None:
                    told.add_tool_call(call.index, call.name, text)
                elif kind == "reasoning":
                    told.add_reasoning(text)
                else:
                    told.add_content(text)
        return told.result()
