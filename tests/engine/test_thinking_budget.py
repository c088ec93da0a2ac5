"""A reasoning ends at its budget, in every way to step, and costs others nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from helpers.agent_models import make_agent_model
from helpers.completions import new_completion
from helpers.engine_runs import answer, assert_nothing_held, greedy, make_engine, run, sampled

from mlx_paged import StructuredOutputsParams, load
from mlx_paged.answers.dialect import AnswerFormat, Dialect
from mlx_paged.answers.formats import REASONING, ReasoningFormat, format_named
from mlx_paged.answers.tokens import ReasoningLimit, TokenReader
from mlx_paged.engine.sampling.sampling_state import ThinkingBudget
from mlx_paged.errors import ArgumentError
from mlx_paged.options.sampling_params import SamplingParams

TIGHT = {"block_size": 8, "kv_cache_bytes": "14blocks", "swap_bytes": 0, "max_num_seqs": 6}
PROMPTS = [
    f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n<think>\n"
    for text in ("Hello, who are you?", "The code of apple is 4821. What is it?", "17 + 25")
]


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    return load(make_agent_model(tmp_path_factory.mktemp("models") / "agent"))


def tokens_of(agent: Any, text: str, params: SamplingParams, **options: Any) -> list[list[int]]:
    """Of each completion of a request that is alone."""
    engine = make_engine(*agent, **options)
    engine.add_request("a", text, params)
    [output] = run(engine).values()
    assert_nothing_held(engine)
    return [completion.token_ids for completion in output.outputs]


def end_of(agent: Any) -> int:
    return agent[1].get_vocab()["</think>"]


@pytest.mark.usefixtures("run_ahead")
@pytest.mark.parametrize("budget", [0, 7])
def test_at_the_budget_the_mark_comes_and_the_answer_goes_on_behind_it(agent, budget: int):
    [text, *_] = PROMPTS
    [free] = tokens_of(agent, text, greedy(20))
    assert end_of(agent) not in free
    prompt = agent[1].encode(text, add_special_tokens=False)
    engine = make_engine(*agent)
    begin = [*free[:budget], end_of(agent)]
    rest = answer(engine, [*prompt, *begin], greedy(20 - len(begin))).outputs[0].token_ids
    engine.add_request("a", prompt, greedy(20, thinking_token_budget=budget))  # a prefix hit
    assert run(engine)["a"].outputs[0].token_ids == begin + rest


def test_a_budget_that_is_not_reached_changes_no_token(agent):
    for text in PROMPTS:
        for params in (greedy(20), sampled(3, n=2)):
            limited = replace(params, thinking_token_budget=30)
            assert tokens_of(agent, text, limited) == tokens_of(agent, text, params)


def test_each_completion_and_each_request_has_a_budget_of_its_own(agent):
    """Also where requests are preempted, and beside some without a budget."""
    params = [
        sampled(1, 60, n=2, ignore_eos=True, thinking_token_budget=5),
        sampled(2, 60, ignore_eos=True, thinking_token_budget=9),
        sampled(3, 60, ignore_eos=True),
    ]
    expected = [tokens_of(agent, *each) for each in zip(PROMPTS, params, strict=True)]
    engine = make_engine(*agent, **TIGHT)
    for index, each in enumerate(zip(PROMPTS, params, strict=True)):
        engine.add_request(str(index), *each)
    outputs = run(engine)
    assert engine.stats().num_preemptions > 0
    found = [[each.token_ids for each in outputs[str(index)].outputs] for index in range(3)]
    assert found == expected
    places = [[tokens.index(end_of(agent)) for tokens in each] for each in found[:2]]
    assert places == [[5, 5], [9]] and end_of(agent) not in found[2][0]


@pytest.mark.usefixtures("is_drafting")
def test_drafts_do_not_pass_the_budget(agent):
    def repeat(tokens: Any, logits: Any) -> Any:
        """Four tokens over and over, so that drafts are accepted."""
        logits[:] = -1e9
        logits[:, 40 + tokens.size % 4] = 0.0
        return logits

    # A request with functions of its own is drawn token by token, and so is one with a budget.
    params = greedy(40, logits_processors=[repeat])
    [free] = tokens_of(agent, PROMPTS[0], params)
    limited = replace(params, thinking_token_budget=17)
    [found] = tokens_of(agent, PROMPTS[0], limited)
    assert found == [*free[:17], end_of(agent), *free[18:]]


def test_a_reasoning_that_the_answer_opens_has_the_budget_too_and_so_has_a_second_one(agent):
    ids = agent[1].get_vocab()
    script = {0: ids["<think>"], 9: ids["<think>"]}

    def open_twice(tokens: Any, logits: Any) -> Any:
        token = script.get(tokens.size - len(prompt))
        if token is not None:
            logits[:] = -1e9
            logits[:, token] = 0.0
        return logits

    prompt = agent[1].encode("Hello", add_special_tokens=False)
    params = greedy(14, logits_processors=[open_twice], thinking_token_budget=4)
    [found] = tokens_of(agent, "Hello", params)
    assert [place for place, token in enumerate(found) if token == end_of(agent)] == [5, 10]
    # Without reasoning there is nothing to end.
    plain = greedy(14, thinking_token_budget=0)
    assert tokens_of(agent, "Hello", plain) == tokens_of(agent, "Hello", greedy(14))


def test_an_answer_with_a_structure_has_it_behind_the_end_that_was_forced(agent):
    wanted = StructuredOutputsParams(
        json={"enum": [{"a": 1}, {"b": 2}]}, begin_after=[end_of(agent)]
    )
    params = greedy(60, thinking_token_budget=6, structured_outputs=wanted)
    [tokens] = tokens_of(agent, PROMPTS[0], params)
    assert tokens.index(end_of(agent)) == 6
    assert json.loads(agent[1].decode(tokens[7:-1])) in ({"a": 1}, {"b": 2})


class Letters:
    """A detokenizer of single letters, and of some marks."""

    def __init__(self, texts: dict[int, str]):
        self._texts = texts

    def add(self, token_id: int) -> str:
        return self._texts.get(token_id, "a")

    def finish(self) -> str:
        return ""


def limit_of(form: AnswerFormat, texts: dict[int, str], end: tuple[int, ...], budget: int):
    return ReasoningLimit(lambda: TokenReader(form, Letters(texts)), end, budget)


def forced_tokens(limit: ReasoningLimit, prompt: list[int], tokens: list[int]) -> list[int | None]:
    """What is forced at each token of an answer, and after the last."""
    request, budget, forced = new_completion("a", prompt), ThinkingBudget(limit), []
    for token in tokens:
        forced.append(budget.forced_token(request))
        request.token_ids.append(token)
    last = budget.forced_token(request)
    assert ThinkingBudget(limit).forced_token(request) == last or limit.end_token_ids[1:]
    return [*forced, last]


def test_a_mark_of_several_tokens_is_forced_from_where_the_model_has_begun_it():
    form = AnswerFormat(Dialect(reasoning=ReasoningFormat("<t>", "</t>")), is_thinking=True)
    limit = limit_of(form, {1: "<t>", 7: "</", 8: "t", 9: ">"}, (7, 8, 9), 3)
    # 7 and 8 come by themselves, and 9 is forced. Another reasoning has the two tokens left.
    assert forced_tokens(limit, [5, 7], [4, 7, 8, 9, 1, 4, 4]) == [*[None] * 3, 9, *[None] * 3, 7]


def test_harmonys_reasoning_is_ended_by_the_header_of_the_answer():
    marks = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>")
    tokens = {mark: (index, True) for index, mark in enumerate(marks, 1)}
    reasoning = next(each for each in REASONING if each.name == "harmony")
    dialect = Dialect.of_tokens(format_named("harmony"), reasoning, tokens)
    form = AnswerFormat.for_prompt(dialect, "<|start|>assistant")
    end = (3, 4, 10, 1, 11, 2)  # <|end|><|start|>assistant<|channel|>final<|message|>
    limit = limit_of(form, {9: "analysis", 10: "assistant", 11: "final"}, end, 2)
    answer = [1, 9, 2, 7, 7, *end, 7, 7, 7]
    assert forced_tokens(limit, [5], answer) == [*[None] * 5, *end, *[None] * 4]


def test_a_mark_in_a_call_neither_opens_nor_ends_reasoning():
    tokens = {mark: (index, False) for index, mark in enumerate(
        ("<think>", "</think>", "<tool_call>", "</tool_call>"), 1
    )}  # fmt: skip
    dialect = Dialect.of_tokens(format_named("json_tools"), REASONING[0], tokens)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    form = AnswerFormat.for_prompt(dialect, "", tools)
    texts = {10: '{"name": "f", "arguments": {"a": "', 11: '"}}'}
    limit = limit_of(form, texts, (2,), 0)
    assert forced_tokens(limit, [5], [3, 10, 1, 7, 11, 4, 7]) == [None] * 8
    reader = limit.new_reader()
    reader.add([1, 7, 7, 2, 3, 10, 1, 7, 2, 11, 4, 7])
    assert (reader.num_reasoning_tokens, reader.num_within) == (4, 2)


@pytest.mark.parametrize(
    ("tokens", "is_thinking", "count"),
    [
        ([7, 7, 7], False, 0),
        ([1, 7, 7, 2, 7], False, 4),
        ([1, 7, 7], False, 3),  # broken off
        ([7, 7, 2, 7], True, 3),
        ([2, 7], True, 1),
        ([2, 7, 1, 2, 7], False, 2),
        ([1, 2, 7, 1, 7, 2], False, 5),
    ],
)
def test_tokens_between_marks_are_counted_with_the_marks(tokens, is_thinking, count):
    dialect = Dialect.of_tokens(None, REASONING[0], {"<think>": (1, True), "</think>": (2, True)})
    for size in range(1, len(tokens) + 1):
        reader = TokenReader(AnswerFormat(dialect, is_thinking=is_thinking), Letters({}))
        for begin in range(0, len(tokens), size):
            reader.add(tokens[begin : begin + size])
        assert reader.num_reasoning_tokens == count


def test_a_model_without_marks_has_no_reasoning_to_end(model):
    engine = make_engine(model)
    for name, budget in (("a", None), ("b", 0)):
        engine.add_request(name, [1, 2, 3], greedy(5, thinking_token_budget=budget))
    outputs = run(engine)
    assert outputs["a"].outputs[0].token_ids == outputs["b"].outputs[0].token_ids


def test_a_budget_is_a_number_of_tokens():
    for value in (-1, 1.5, "many"):
        with pytest.raises(ArgumentError) as refused:
            SamplingParams(thinking_token_budget=value)  # type: ignore[arg-type]
        assert refused.value.argument == "thinking_token_budget"
