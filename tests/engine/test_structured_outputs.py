"""Structured outputs: every answer is in its grammar, in every way to step, and tokens of others
stay as they are.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import gc
import itertools
import json
import random
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from helpers.engine_runs import (
    answer,
    assert_nothing_held,
    greedy,
    known_of,
    lose_all_kv,
    make_engine,
    make_engine_without_drafts,
    run,
    sampled,
)
from helpers.fast_lane import mostly_slow
from helpers.json_schemas import is_valid, random_schema
from llguidance import LLMatcher
from mlx_lm.tokenizer_utils import NewlineTokenizer, TokenizerWrapper
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlx_paged import AsyncEngine, SamplingParams, StructuredOutputsParams
from mlx_paged.engine.request import Completion, Request, TokenRules
from mlx_paged.engine.sampling import grammar, grammar_trial
from mlx_paged.engine.sampling.grammar import CompiledGrammar, GrammarCompiler
from mlx_paged.engine.sampling.sampler import sample
from mlx_paged.engine.sampling.sampling_state import GrammarState, fill_masks
from mlx_paged.errors import ArgumentError, StructuredOutputError
from mlx_paged.request import CompletionOutput, RequestOutput

in_all_ways = pytest.mark.usefixtures("run_ahead")

PROMPTS = ["Hello, who are you? ", "The code of apple is 4821. What", "Once upon a time "]
TIGHT = {"block_size": 8, "kv_cache_bytes": "14blocks", "swap_bytes": 0, "max_num_seqs": 6}
# Grammars of some thousand alternatives at each point.
TOO_COMPLEX = {"properties": {f"p{number}": {"type": "integer"} for number in range(700)}}


def structured(**options: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(**options)


def end_of(completion: CompletionOutput, schema: dict[str, Any]) -> str:
    """How a completion ended; those that ended by themselves are valid."""
    if completion.finish_reason == "stop":
        assert is_valid(json.loads(completion.text), schema), (completion.text, schema)
    return str(completion.finish_reason)


def answers_of(outputs: dict[str, RequestOutput]) -> dict[str, list[tuple]]:
    return {
        name: [(each.token_ids, each.text, each.finish_reason) for each in output.outputs]
        for name, output in outputs.items()
    }


# The answers


def random_requests(seed: int, count: int) -> dict[str, tuple[dict[str, Any] | None, Any]]:
    """The schema of each request and its parameters; a third has no schema."""
    rng = random.Random(seed)
    requests = {}
    for number in range(count):
        schema = random_schema(rng) if number % 3 else None
        params = greedy(120) if rng.random() < 0.3 else sampled(number, 120, n=rng.choice([1, 3]))
        if rng.random() < 0.3:
            params = params.clone(repetition_penalty=1.2, logprobs=1)
        if schema is None:
            params = params.clone(max_tokens=20)
        else:
            params = params.clone(structured_outputs=structured(json=schema))
        requests[f"{number}"] = schema, params
    return requests


def run_all(
    demo: tuple[Any, Any], requests: dict[str, tuple[Any, SamplingParams]], **options: Any
) -> dict[str, RequestOutput]:
    engine = make_engine(*demo, **options)
    for number, (name, (_, params)) in enumerate(requests.items()):
        engine.add_request(name, PROMPTS[number % 3], params)
    outputs = run(engine)
    assert_nothing_held(engine)
    if options:
        assert engine.stats().num_preemptions > 0
    return outputs


@mostly_slow(
    ("run_ahead", "seed"),
    [("waiting", 0), ("ahead", 0), ("drafting", 0)],
    quick=(2,),
    indirect=["run_ahead"],
)
def test_answers_of_random_schemas_are_valid_and_the_same_under_preemption(
    demo: tuple[Any, Any], seed: int, is_drafting: bool
):
    requests = random_requests(seed, 12)
    outputs = run_all(demo, requests, **TIGHT)
    ends = [
        end_of(completion, schema)
        for name, (schema, _) in requests.items()
        if schema is not None
        for completion in outputs[name].outputs
    ]
    assert ends.count("stop") == len(ends) > 12
    completions = [each for out in outputs.values() for each in out.outputs]
    drafted = sum(each.spec_decoding.num_accepted_tokens for each in completions)
    assert (drafted > 0) == is_drafting
    # One by one, waiting, with room for all; once for all ways.
    known = known_of(demo[0])
    if ("alone", seed) not in known:
        known["alone", seed] = {}
        for number, (name, (_, params)) in enumerate(requests.items()):
            engine = make_engine_without_drafts(*demo, run_ahead=False, kv_cache_bytes="400blocks")
            engine.add_request(name, PROMPTS[number % 3], params)
            known["alone", seed] |= answers_of(run(engine))
    assert answers_of(outputs) == known["alone", seed]


def test_the_validator_of_these_tests_can_say_no():
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 3}, "s": {"const": "a"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    assert is_valid({"n": 2, "s": "a"}, schema) and is_valid({"n": 1}, schema)
    for wrong in ({}, {"n": 4}, {"n": True}, {"n": 1, "s": "b"}, {"n": 1, "x": 1}, [1], "n"):
        assert not is_valid(wrong, schema)
    items = {"type": "array", "items": {"enum": [1, None]}, "minItems": 1, "maxItems": 2}
    assert is_valid([1, None], items)
    for wrong in ([], [1, 1, 1], [True], [0]):
        assert not is_valid(wrong, items)


@in_all_ways
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"regex": r"\d{3}-[a-z]{1,5} (x|yz)"}, r"\d{3}-[a-z]{1,5} (x|yz)"),
        ({"choice": ["yes", "no", 'may"be', "ü\n"]}, 'yes|no|may"be|ü\n'),
        ({"grammar": 'start: "x" "y"{1,3} | "(" start ")"'}, r"\(*xy{1,3}\)*"),
        ({"json": True}, None),
        ({"json_object": True}, None),
        ({"json_object": True, "whitespace_flexible": True}, None),
        ({"json": json.dumps({"type": "array", "items": {}, "maxItems": 2})}, None),
    ],
    ids=str,
)
def test_each_kind_holds(
    demo: tuple[Any, Any], options: dict[str, Any], pattern: str | None, temperature: float
):
    engine = make_engine(*demo)
    params = SamplingParams(
        n=3 if temperature else 1,
        temperature=temperature,
        max_tokens=40,
        structured_outputs=structured(**options),
    )
    completions = answer(engine, PROMPTS[0], params).outputs
    num_stopped = 0
    for completion in completions:
        if completion.finish_reason == "stop":
            num_stopped += 1
            if pattern is not None:
                assert re.fullmatch(pattern, completion.text), completion.text
            else:
                value = json.loads(completion.text)
                assert isinstance(value, dict) or "json_object" not in options
        elif pattern is None:
            is_line = "\n" not in completion.text
            assert is_line or options.get("whitespace_flexible")
    assert num_stopped > 0 or "grammar" not in str(options) or temperature == 0


def test_json_has_a_space_at_most_after_commas_and_colons(demo: tuple[Any, Any]):
    def is_accepted(text: str, **options: Any) -> bool:
        schema = {"type": "object", "additionalProperties": {"type": "array"}}
        compiler = GrammarCompiler(demo[1], 1024)
        grammar = compiler.compile(structured(json=schema, **options))
        tokens = demo[1].encode(text, add_special_tokens=False)
        return grammar.matcher.deep_copy().validate_tokens(tokens) == len(tokens)

    for text in ('{"a":[1,2],"b":[]}', '{"a": [1, 2], "b": []}', '{"a": [1,2]}'):
        assert is_accepted(text)
        assert is_accepted(text, whitespace_flexible=True)
    for text in ('{ "a":[]}', '{"a":  []}', '{"a" :[]}', '{"a":[1 ]}', '\n{"a":[]}', '{"a":\n[]}'):
        assert not is_accepted(text)
    assert is_accepted('{ "a" :\n[1 ]}', whitespace_flexible=True)


# Masks, on a vocabulary whose answers can be counted

LETTERS = "abc"
TOKENS = ["a", "b", "c", "ab", "bc", "aa", "cab", "bca"]
END, OTHER_END, PADDED_SIZE = len(TOKENS), len(TOKENS) + 1, 40


def small_tokenizer(ends: Sequence[int] = (END, OTHER_END)) -> TokenizerWrapper:
    vocabulary = {token: index for index, token in enumerate(TOKENS)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>", "<other end>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    return TokenizerWrapper(fast, eos_token_ids=list(ends))


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(small_tokenizer(), PADDED_SIZE)


def request_of(
    grammar: CompiledGrammar | None, tokens: Sequence[int] = (), **params: Any
) -> Completion:
    rules = TokenRules(grammar=grammar)
    (completion,) = Request("r", [1, 2], SamplingParams(**params), token_rules=rules).completions
    completion.token_ids.extend(tokens)
    return completion


def allowed_after(grammar: CompiledGrammar, tokens: Sequence[int]) -> set[int]:
    allowed, failed = fill_masks([GrammarState(grammar)], [request_of(grammar, tokens)])
    assert allowed.shape == (1, PADDED_SIZE) and not failed
    return set(np.flatnonzero(allowed[0]).tolist())


@pytest.mark.parametrize(
    "pattern", ["(ab|c){1,3}", "a[bc]?a*", "(abc|bca|a)(b|c)?", "c{0,4}", "(a|ab)(c|bca)", "abcabc"]
)
def test_masks_are_those_of_brute_force(compiler: GrammarCompiler, pattern: str):
    longest = 7  # of the texts that are looked at; no token is longer than 3
    texts = [
        "".join(each) for n in range(longest + 1) for each in itertools.product(LETTERS, repeat=n)
    ]
    answers = {text for text in texts if re.fullmatch(pattern, text)}
    begins = {text[:end] for text in answers for end in range(len(text) + 1)}
    grammar = compiler.compile(structured(regex=pattern))
    num_checked = 0

    def check(text: str, tokens: list[int]) -> None:
        nonlocal num_checked
        expected = {index for index, token in enumerate(TOKENS) if text + token in begins}
        if text in answers:
            expected |= {END, OTHER_END}
        rests = [answer[len(text) :] for answer in answers if answer.startswith(text)]
        allowed = allowed_after(grammar, tokens)
        # Text that has to come now comes in the tokens that the tokenizer makes of it.
        if forced := _common_beginning(rests):
            canonical = {TOKENS.index(forced[0])}
            assert allowed in (canonical, expected), text
        else:
            assert allowed == expected, text
        num_checked += 1
        for index in sorted(allowed - {END, OTHER_END}):
            if len(text) < 3:
                check(text + TOKENS[index], [*tokens, index])

    check("", [])
    assert num_checked > 2


def _common_beginning(texts: Sequence[str]) -> str:
    columns = itertools.takewhile(lambda each: len(set(each)) == 1, zip(*texts, strict=False))
    return "".join(letters[0] for letters in columns)


def test_masks_of_a_batch_are_each_mask_alone(compiler: GrammarCompiler):
    patterns, answers = ["a+", "b(c|a)", "cab"], [[0, 0], [1], [2]]
    grammars = [compiler.compile(structured(regex=each)) for each in patterns]
    requests = [
        request_of(grammar, tokens) for grammar, tokens in zip(grammars, answers, strict=True)
    ]
    plain = request_of(None, [3])
    logits = mx.array(np.random.default_rng(0).normal(size=(4, PADDED_SIZE)).astype(np.float32))
    before = np.array(logits)
    seen: list[set[int]] = []

    def look(row: mx.array) -> mx.array:
        seen.append(set(np.flatnonzero(np.array(row[0]) > -np.inf).tolist()))
        return mx.argmax(row, axis=-1)

    batch = [requests[0], plain, *requests[1:]]
    for completion in batch:
        request = completion.request
        request.params = dataclasses.replace(request.params, sampler=look)
    sampled_tokens = sample(logits, [0, 1, 2, 3], batch).read()
    everything = set(range(PADDED_SIZE))
    assert seen == [{0, 5, END, OTHER_END}, everything, {0, 2}, {0}]
    assert all(each.token_id in wanted for each, wanted in zip(sampled_tokens, seen, strict=True))
    assert (np.array(logits) == before).all(), "the logits are the model's, for their probabilities"
    assert plain.sampling_state.grammar is None


def test_a_vocabulary_smaller_than_the_tokenizers_is_enough_for_masks(compiler: GrammarCompiler):
    grammar = GrammarCompiler(small_tokenizer(), END + 1).compile(structured(regex="(b|c)?"))
    allowed, failed = fill_masks([GrammarState(grammar)], [request_of(grammar)])
    assert not failed and np.flatnonzero(allowed[0]).tolist() == [1, 2, END]
    assert allowed.shape == (1, END + 1)


def test_reasoning_is_free_and_has_no_end_until_the_structure_begins(compiler: GrammarCompiler):
    grammar = compiler.compile(structured(regex="a(b|c)", begin_after=[2, 1, 2]))
    free = set(range(len(TOKENS)))
    for reasoning in ([], [2], [2, 1], [0, 2, 1], [2, 1, 1, 2, 1], [0] * 5):
        assert allowed_after(grammar, reasoning) == free
    for begin in ([2, 1, 2], [2, 1, 2, 1, 2][:3], [0, 2, 1, 2]):
        assert allowed_after(grammar, begin) == {0, 3}
        assert allowed_after(grammar, [*begin, 0]) == {1, 2}
        assert allowed_after(grammar, [*begin, 3]) == {END, OTHER_END}
    # Token by token as well as at once.
    state, request = GrammarState(grammar), request_of(grammar)
    seen = []
    for token in (1, 2, 1, 2, 0, 1):
        request.token_ids.append(token)
        allowed, _ = fill_masks([state], [request])
        seen.append(set(np.flatnonzero(allowed[0]).tolist()))
    assert seen == [free, free, free, {0, 3}, {1, 2}, {END, OTHER_END}]


def test_a_line_may_be_broken_behind_the_reasoning_and_nowhere_else(compiler: GrammarCompiler):
    compiled = compiler.compile(structured(regex="a(b|c)", begin_after=[2]))
    vocabulary = replace(compiled.vocabulary, line_breaks=frozenset({5}))
    grammar = replace(compiled, vocabulary=vocabulary)
    assert allowed_after(grammar, [2]) == {0, 3, 5}
    assert allowed_after(grammar, [2, 5]) == {0, 3, 5}
    assert allowed_after(grammar, [2, 5, 5]) == {0, 3}
    assert allowed_after(grammar, [2, 0]) == allowed_after(grammar, [2, 5, 0]) == {1, 2}
    assert allowed_after(grammar, [2, 5, 5, 3]) == {END, OTHER_END}
    at_once = replace(grammar, begin_after=())
    assert allowed_after(at_once, []) == {0, 3}


def test_an_answer_that_does_not_open_its_reasoning_is_structured_at_once(
    compiler: GrammarCompiler,
):
    options = {"begin_after": [2, 1], "reasoning_start": [7, 5]}
    grammar = compiler.compile(structured(regex="a(b|c)", **options))
    free = set(range(len(TOKENS)))
    assert allowed_after(grammar, []) == {0, 3, 7}
    assert allowed_after(grammar, [0]) == {1, 2}
    assert allowed_after(grammar, [0, 1]) == {END, OTHER_END}
    assert allowed_after(grammar, [7]) == {5}
    assert allowed_after(grammar, [7, 5]) == allowed_after(grammar, [7, 5, 0, 2]) == free
    assert allowed_after(grammar, [7, 5, 2, 1]) == {0, 3}
    assert allowed_after(grammar, [7, 5, 0, 2, 1, 3]) == {END, OTHER_END}


# With other settings


@in_all_ways
def test_reasoning_comes_before_the_structure(demo: tuple[Any, Any]):
    schema = {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 3}
    params = sampled(5, 90)
    engine = make_engine(*demo)
    free = answer(engine, PROMPTS[0], params).outputs[0].token_ids
    pairs = list(itertools.pairwise(free))
    last = next(place for place in range(4, 40) if pairs.index(pairs[place]) == place) + 2
    reasoning = free[:last]
    wanted = structured(json=schema, begin_after=reasoning[-2:])
    engine.add_request("a", PROMPTS[0], params.clone(structured_outputs=wanted))
    completion = run(engine)["a"].outputs[0]
    assert completion.token_ids[:last] == reasoning
    text = demo[1].decode(completion.token_ids[last:-1])
    assert completion.finish_reason == "stop" and is_valid(json.loads(text), schema)


@in_all_ways
def test_other_masks_bias_and_stops_go_with_a_grammar(demo: tuple[Any, Any]):
    tokenizer = demo[1]

    def answer_to(regex: str, **options: Any) -> tuple[str, Any, Exception | None]:
        engine = make_engine(*demo)
        params = SamplingParams(structured_outputs=structured(regex=regex), **options)
        engine.add_request("a", PROMPTS[0], params)
        engine.add_request("plain", PROMPTS[1], greedy(5))
        outputs = run(engine)
        assert outputs["plain"].error is None and len(outputs["plain"].outputs[0].token_ids) == 5
        completion = outputs["a"].outputs[0]
        return completion.text, completion.finish_reason, outputs["a"].error

    letters = [tokenizer.convert_tokens_to_ids(each) for each in "xyz"]
    assert None not in letters
    x, y, z = letters
    assert answer_to("[xyz]", logit_bias={y: 1e30})[:2] == ("y", "stop")
    assert answer_to("[xyz]", allowed_token_ids=[z, 2, 50])[:2] == ("z", "stop")
    assert answer_to("[xy]", allowed_token_ids=[x, y, 2], bad_words=["x"])[:2] == ("y", "stop")
    assert answer_to("x{2,9}y", stop=["y"])[1] == "stop"
    assert answer_to("x{2,9}y", stop=["y"])[0].strip("x") == ""
    text, reason, _ = answer_to("x{3,30}", min_tokens=8, max_tokens=60)
    assert reason == "stop" and 3 <= len(text) <= 30
    # Nothing may end it, and it can't go on.
    _, reason, error = answer_to("xyz", min_tokens=50, max_tokens=60)
    assert reason == "error" and "min_tokens and structured_outputs together allow no token" in str(
        error
    )
    text, reason, _ = answer_to("x{500}", max_tokens=4)
    assert reason == "length" and text.strip("x") == ""

    def ignores_the_grammar(tokens: mx.array, logits: mx.array) -> mx.array:
        return mx.zeros_like(logits).at[:, z].add(1.0)

    _, reason, error = answer_to("[xy]{3}", logits_processors=[ignores_the_grammar])
    assert reason == "error" and isinstance(error, StructuredOutputError)
    assert str(error).startswith("[structured_outputs] the answer left its grammar: ")


@in_all_ways
def test_a_grammar_that_gets_too_complex_fails_its_request_alone(demo: tuple[Any, Any]):
    engine = make_engine(*demo)
    good = sampled(5, 30, structured_outputs=structured(json={"type": "string", "maxLength": 9}))
    expected = answer(engine, PROMPTS[1], good).outputs[0].token_ids
    bad = {"properties": TOO_COMPLEX["properties"], "type": "object"}
    for number in range(2):
        engine.add_request(
            f"bad {number}", PROMPTS[0], good.clone(structured_outputs=structured(json=bad))
        )
        engine.add_request(f"good {number}", PROMPTS[1], good)
    outputs = run(engine)
    for number in range(2):
        assert outputs[f"good {number}"].outputs[0].token_ids == expected
        assert outputs[f"bad {number}"].outputs[0].finish_reason == "error"
        message = str(outputs[f"bad {number}"].error)
        assert message.startswith("[structured_outputs] ") and "\n" not in message


@in_all_ways
def test_answers_go_on_the_same_when_all_kv_are_lost(demo: tuple[Any, Any]):
    requests = {name: request for name, request in random_requests(7, 5).items() if request[0]}
    expected = answers_of(run_all(demo, requests))
    engine = make_engine(*demo)
    for number, (name, (_, params)) in enumerate(requests.items()):
        engine.add_request(name, PROMPTS[number % 3], params)
    outputs: dict[str, RequestOutput] = {}
    for step in range(1000):
        if step % 7 == 3:
            lose_all_kv(engine)
        outputs |= {each.request_id: each for each in engine.step() if each.finished}
        if not engine.has_unfinished_requests():
            break
    assert answers_of(outputs) == expected


@in_all_ways
def test_a_step_that_fails_is_taken_back_and_changes_no_answer(demo: tuple[Any, Any]):
    requests = {name: request for name, request in random_requests(7, 5).items() if request[0]}
    expected = answers_of(run_all(demo, requests))
    engine = make_engine(*demo)
    for number, (name, (_, params)) in enumerate(requests.items()):
        engine.add_request(name, PROMPTS[number % 3], params)
    calls = itertools.count()

    def fails_now_and_then(*args: Any) -> mx.array:
        logits: mx.array = demo[0](*args)
        if next(calls) in (2, 9):  # Several requests run then, so none of them is to blame.
            raise LookupError("the step fails")
        return logits

    engine.runner.model = fails_now_and_then
    assert answers_of(run(engine)) == expected and next(calls) > 20


# Arguments


@pytest.mark.parametrize(
    ("options", "argument", "message"),
    [
        ({"regex": "(["}, "regex", "regex can't be compiled: .*unclosed character class"),
        ({"regex": r"(?=a)b"}, "regex", "regex can't be compiled: .*look-around"),
        ({"regex": r"[^\s\S]"}, "regex", "no answer of this vocabulary is in regex"),
        ({"grammar": "start: other"}, "grammar", "grammar can't be compiled: .*unknown name"),
        ({"grammar": "start: again\nagain: again"}, "grammar", "no answer .* is in grammar"),
        ({"json": {"type": "foo"}}, "json", "json can't be compiled: .*foo"),
        ({"json": {"not": {}}}, "json", 'json can\'t be compiled: Unimplemented keys: ."not"'),
        ({"json": {"$ref": "http://x.y/z"}}, "json", "json can't be compiled: .*http://x.y/z"),
        ({"json": {"$ref": "#"}}, "json", "no answer of this vocabulary is in json"),
        ({"json": {"minimum": 3, "maximum": 1, "type": "integer"}}, "json", "can't be compiled"),
        ({"json": '"\\ud800"'}, "json", "must be a JSON schema, which is an object or true"),
        ({"json": {"const": "\ud800"}}, "json", "json can't be compiled"),
        ({"choice": ["yes"], "begin_after": [99999]}, "begin_after", "token id 99999"),
    ],
    ids=str,
)
def test_grammars_that_can_not_be_met_are_refused_before_anything_remembers_the_request(
    demo: tuple[Any, Any], options: dict[str, Any], argument: str, message: str
):
    engine = make_engine(*demo)
    with pytest.raises(ArgumentError, match=message) as refused:
        params = SamplingParams(structured_outputs=structured(**options))
        engine.add_request("a", PROMPTS[0], params)
    assert refused.value.argument == argument and "\n" not in str(refused.value)
    assert str(refused.value).startswith("[structured_outputs] ")


@pytest.mark.slow
def test_a_grammar_that_refers_as_deeply_as_its_length_allows_ends_no_process():
    # Where it did, this process would have to tell.
    script = """
import json
from mlx_paged import load, demo_model_path, StructuredOutputsParams as Params
from mlx_paged.engine.sampling.grammar import GrammarCompiler
from mlx_paged.errors import ArgumentError
compiler = GrammarCompiler(load(demo_model_path())[1], 1024)
rules = "".join(f'r{n}: (((("b" r{n + 1}))))\\n' for n in range(9000))
refs = {f"d{n}": {"items": {"items": {"$ref": f"#/$defs/d{n + 1}"}}} for n in range(4000)}
terms = "".join(f"R{n}: R{n + 1}\\n" for n in range(9000))
for params in (
    Params(grammar="start: r0\\n" + rules + 'r9000: "a"'),
    Params(grammar="start: R0\\n" + terms + 'R9000: "a"'),
    Params(json={"$ref": "#/$defs/d0", "$defs": refs | {"d4000": {"type": "integer"}}}),
):
    try:
        compiler.compile(params)
    except ArgumentError as error:
        assert "can't be compiled" in str(error)
print("alive")
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ran.stdout.endswith("alive\n"), ran.stderr[-500:]


@pytest.mark.parametrize(
    ("does", "timeout", "message"),
    [("dies", 60.0, "it crashes the compiler"), ("waits", 0.01, "it takes more than")],
)
def test_a_grammar_that_ends_the_compiler_or_takes_for_ever_is_refused(
    compiler: GrammarCompiler,
    monkeypatch: pytest.MonkeyPatch,
    does: str,
    timeout: float,
    message: str,
):
    ask, wanted = grammar_trial._ask, structured(regex={"dies": "a{3}", "waits": "b{3}"}[does])

    def goes_wrong(process: subprocess.Popen[str], question: Any) -> str:
        if does == "dies":
            process.kill()
        process.wait(30)  # for the timer, where it is alive
        return ask(process, question)

    with monkeypatch.context() as patch:
        patch.setattr(grammar_trial, "_ask", goes_wrong)
        patch.setattr(grammar_trial, "TIMEOUT", timeout)
        with pytest.raises(ArgumentError, match=message) as refused:
            compiler.compile(wanted)
        assert refused.value.argument == "regex"
    if does == "waits":  # The machine may have been busy.
        compiler.compile(wanted)
    else:
        with monkeypatch.context() as patch:
            patch.setattr(grammar_trial, "_ask", no_trial)
            with pytest.raises(ArgumentError, match=message):
                compiler.compile(wanted)


def no_trial(*args: object) -> str:
    raise AssertionError("it is tried again")


def test_refusals_are_remembered_and_the_last_ones_only(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(grammar, "NUM_REFUSALS", 2)
    tried: list[str] = []

    def try_it(vocabulary: object, text: str, kind: str) -> None:
        tried.append(text)

    monkeypatch.setattr(grammar, "_try", try_it)

    def refuse(regex: str) -> str:
        with pytest.raises(ArgumentError) as refused:
            compiler.compile(structured(regex=regex))
        assert refused.value.argument == "regex"
        return str(refused.value)

    first = refuse("([")
    assert "regex can't be compiled" in first
    assert [refuse("(["), refuse("(["), len(tried)] == [first, first, 1]
    refuse("(")
    refuse("[")
    assert len(tried) == 3 and refuse("([") == first and len(tried) == 4


def test_a_trial_has_a_limit_of_cpu_time(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(grammar_trial, "MAX_CPU_SECONDS", 0)  # to the end of its first second
    light = compiler.compile(structured(regex="a")).vocabulary.light
    trials = grammar_trial.TrialProcess()
    text = LLMatcher.grammar_from_json_schema('{"multipleOf": 100000007}')
    failure = trials.failure_of(text, light)
    assert failure == grammar_trial.Failure("takes more than 0 seconds", is_certain=True)
    assert trials.failure_of('start: "a"', light) is None


def test_a_grammar_that_takes_long_holds_up_no_other(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
):
    light = compiler.compile(structured(regex="a")).vocabulary.light
    ask, begun, go_on = grammar_trial._ask, threading.Event(), threading.Event()

    def waits(process: subprocess.Popen[str], question: Any) -> str:
        if question["text"] == "long":
            begun.set()
            assert go_on.wait(30)
            return "done"
        return ask(process, question)

    monkeypatch.setattr(grammar_trial, "_ask", waits)
    trials = grammar_trial.Trials()
    thread = threading.Thread(target=trials.failure_of, args=("long", light))
    thread.start()
    try:
        assert begun.wait(30)
        assert trials.failure_of('start: "a"', light) is None
        assert thread.is_alive()
    finally:
        go_on.set()
        thread.join()


def test_an_interrupt_of_a_trial_leaves_the_next_one_its_own_answer(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
):
    trials = grammar_trial.TrialProcess()
    light = compiler.compile(structured(regex="a")).vocabulary.light
    assert trials.failure_of('start: "a"', light) is None
    process = trials._process
    with monkeypatch.context() as patch:
        patch.setattr(grammar_trial, "_ask", raises_interrupt)
        with pytest.raises(KeyboardInterrupt):
            trials.failure_of('start: "a"', light)
    assert process is not None and process.wait(10) != 0
    assert trials.failure_of('start: "b"', light) is None and trials._process is not process
    last = trials._process
    del trials
    gc.collect()
    assert last is not None and last.poll() is not None, "it goes with who started it"


def raises_interrupt(*args: object) -> None:
    raise KeyboardInterrupt


def test_what_structured_outputs_need_is_named(
    demo: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
):
    wanted = structured(regex="a")
    with pytest.raises(ArgumentError, match="need a tokenizer"):
        GrammarCompiler(None, 1024).compile(wanted)
    with pytest.raises(ArgumentError, match="need a tokenizer with an end of sequence"):
        GrammarCompiler(small_tokenizer(), 3).compile(wanted)
    slow = copy.copy(demo[1])
    slow._tokenizer = object()
    with pytest.raises(ArgumentError, match="need a fast tokenizer of Hugging Face, got object"):
        GrammarCompiler(slow, 1024).compile(wanted)
    slow._tokenizer = NewlineTokenizer(tokenizer_object=demo[1]._tokenizer.backend_tokenizer)
    with pytest.raises(ArgumentError, match=r"fast tokenizer .*, got NewlineTokenizer"):
        GrammarCompiler(slow, 1024).compile(wanted)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ArgumentError, match=re.escape("pip install 'mlx-paged[server]'")):
        GrammarCompiler(demo[1], 1024).compile(wanted)


def test_a_grammar_is_compiled_once_and_the_last_ones_are_remembered(compiler: GrammarCompiler):
    first = compiler.compile(structured(choice=["ab", "c"]))
    again = compiler.compile(structured(choice=["ab", "c"], begin_after=[1]))
    assert again.matcher is first.matcher and again.begin_after == (1,)
    for number in range(1, 40):
        compiler.compile(structured(regex="a" * number))
    assert compiler.compile(structured(choice=["ab", "c"])).matcher is not first.matcher


def test_threads_may_ask_for_grammars_at_the_same_time(demo: tuple[Any, Any]):
    engine = make_engine(*demo)
    errors: list[BaseException] = []

    def add(number: int) -> None:
        try:
            regex = f"[a-f]{{{number % 3 + 1}}}"
            params = SamplingParams(structured_outputs=structured(regex=regex), max_tokens=9)
            engine.add_request(f"{number}", PROMPTS[number % 3], params)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=add, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    outputs = run(engine)
    assert not errors and len(outputs) == 12
    for name, output in outputs.items():
        assert re.fullmatch(f"[a-f]{{{int(name) % 3 + 1}}}", output.outputs[0].text)


def test_an_event_loop_does_not_wait_for_the_compiler(
    demo: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
):
    compiled_in: list[str] = []
    compile_grammar = GrammarCompiler.compile

    def compile_slowly(self: GrammarCompiler, params: StructuredOutputsParams) -> CompiledGrammar:
        compiled_in.append(threading.current_thread().name)
        return compile_grammar(self, params)

    monkeypatch.setattr(GrammarCompiler, "compile", compile_slowly)

    async def ask() -> tuple[str, str]:
        async with AsyncEngine(*demo, kv_cache_bytes="100blocks") as engine:
            params = SamplingParams(structured_outputs=structured(choice=["yes", "no"]))
            text = ""
            async for output in engine.generate(PROMPTS[0], params):
                text = output.outputs[0].text
            bad = SamplingParams(structured_outputs=structured(regex="(["))
            with pytest.raises(ArgumentError, match="regex can't be compiled"):
                async for _ in engine.generate(PROMPTS[0], bad):
                    pass
            assert engine.stats().num_running == 0
            return text, threading.current_thread().name

    text, loop_thread = asyncio.run(ask())
    assert text in ("yes", "no")
    assert len(compiled_in) == 2 and loop_thread not in compiled_in
