"""What an output holds: the answer so far, what is new, or the whole answer at the end."""

from __future__ import annotations

import asyncio
import random
import threading

import pytest
from helpers.fast_lane import mostly_slow

from mlx_paged import AsyncEngine, Engine, RequestOutputKind, SamplingParams
from mlx_paged.engine.reports import Latencies, Reports
from mlx_paged.engine.request import Request, merge_parts
from mlx_paged.request import Logprob

LONG = "<|im_start|>user\nCount from 20 to 60.<|im_end|>\n<|im_start|>assistant\n"
DELTA, FINAL_ONLY = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


def joined(outputs):
    """Text, tokens, logprobs and end of each completion, from the parts of an output."""
    whole = {}
    for output in outputs:
        for part in output.outputs:
            text, tokens, logprobs, _ = whole.get(part.index, ("", [], [], None))
            whole[part.index] = (
                text + part.text,
                tokens + part.token_ids,
                logprobs + (part.logprobs or []),
                part.finish_reason,
            )
    return whole


def run(engine, requests):
    for name, text, params in requests:
        engine.add_request(name, text, params)
    outputs = {name: [] for name, _, _ in requests}
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs[output.request_id].append(output)
    return outputs


def requests_of(kind, seed):
    draws = random.Random(seed)
    return [
        (
            str(number),
            draws.choice(["Count from 5 to 30.", "The code of apple is 4821. Say it.", "List:"]),
            SamplingParams(
                n=draws.choice([1, 1, 3]),
                max_tokens=draws.randint(1, 40),
                temperature=draws.choice([0, 0.9]),
                seed=number,
                stop=draws.choice([(), ("1 1",), ("e",)]),
                logprobs=draws.choice([None, 2]),
                output_kind=kind,
            ),
        )
        for number in range(8)
    ]


@mostly_slow(
    ("run_ahead", "seed"),
    [("waiting", 0), ("ahead", 1), ("drafting", 2), ("drafting", 0)],
    indirect=["run_ahead"],
    quick=(1,),
)
def test_what_is_new_adds_up_to_the_whole_answer(demo, seed, run_ahead):
    model, tokenizer = demo
    whole, parts, last = (
        run(Engine(model, tokenizer, kv_cache_bytes="24blocks", seed=1), requests_of(kind, seed))
        for kind in (RequestOutputKind.CUMULATIVE, DELTA, FINAL_ONLY)
    )
    for name, outputs in whole.items():
        expected = joined(outputs[-1:])
        assert joined(parts[name]) == joined(last[name]) == expected
        assert len(last[name]) == 1
        assert len(parts[name]) > 1 or len(outputs[-1].outputs[0].token_ids) == 1


def test_the_last_part_has_all_completions_and_those_before_only_what_changed(demo):
    model, tokenizer = demo
    params = SamplingParams(n=3, max_tokens=30, temperature=1.0, seed=2, output_kind=DELTA)
    parts = run(Engine(model, tokenizer), [("a", "Count from 5 to 30.", params)])["a"]
    assert [part.index for part in parts[-1].outputs] == [0, 1, 2]
    assert all(part.finished for part in parts[-1].outputs)
    assert all(part.token_ids for output in parts[:-1] for part in output.outputs)


def test_parts_that_are_merged_are_one_part_in_any_grouping():
    draws = random.Random(0)
    for _ in range(200):
        request = Request("a", [1], SamplingParams(n=2, output_kind=DELTA))
        request.completions.append(request.completions[0].fork(1))
        reports, parts = Reports(Latencies(None)), []
        reports.requests["a"] = request
        for number in range(6):
            for completion in request.output.outputs:
                if draws.random() < 0.5 and completion.finish_reason is None:
                    completion.text += f"{number}ä"
                    completion.token_ids.append(number)
                    completion.logprobs = [
                        *(completion.logprobs or []), {number: Logprob(-1.0, 1)}
                    ]  # fmt: skip
                    completion.finish_reason = "stop" if draws.random() < 0.2 else None
            reports.note(request.completions[0])
            parts += reports.report()
        expected = joined(parts)
        while len(parts) > 1:
            at = draws.randrange(len(parts) - 1)
            parts[at : at + 2] = [merge_parts(parts[at], parts[at + 1])]
        assert joined(parts) == expected


def test_a_slow_reader_gets_what_it_missed_in_one_part(demo):
    model, tokenizer = demo
    params = SamplingParams(max_tokens=40, output_kind=DELTA)

    async def read(engine, pause):
        parts = []
        async for output in engine.generate(LONG, params):
            parts.append(output)
            await asyncio.sleep(pause)
        return parts

    async def both():
        async with AsyncEngine(model, tokenizer) as engine:
            return await asyncio.gather(read(engine, 0), read(engine, 0.2))

    quick, slow = asyncio.run(both())
    assert joined(quick) == joined(slow)
    assert len(slow) < len(quick)
    with AsyncEngine(model, tokenizer) as engine:
        assert joined(engine.stream(LONG, params)) == joined(quick)
        outputs = list(engine.stream(LONG, params.clone(output_kind=FINAL_ONLY)))
    assert joined(outputs) == joined(quick)
    assert len(outputs) == 1


def test_no_caller_of_an_async_engine_waits_for_a_step(demo, monkeypatch):
    model, tokenizer = demo
    with AsyncEngine(model, tokenizer) as engine:
        stepping, go_on = threading.Event(), threading.Event()
        run_step = engine.engine.steps.run

        def slow_step():
            stepping.set()
            assert go_on.wait(30)
            return run_step()

        stream = engine.stream("Count from 5 to 9.", request_id="a")
        monkeypatch.setattr(engine.engine.steps, "run", slow_step)
        assert stepping.wait(30)
        stepping.clear()
        done = threading.Event()

        def call():
            second = engine.stream("Count from 5 to 30.", request_id="b")
            engine.abort("b")
            second.close()
            done.set()

        threading.Thread(target=call, daemon=True).start()
        assert done.wait(10)
        go_on.set()
        assert list(stream)[-1].finished


def test_an_answer_of_an_llm_is_whole_whatever_its_kind(demo):
    from mlx_paged import LLM

    llm = LLM(*demo)
    answers = [
        llm.generate(["Count from 5 to 30."], SamplingParams(max_tokens=9, output_kind=kind))[0]
        .outputs[0]
        .text
        for kind in RequestOutputKind
    ]
    assert len(set(answers)) == 1
    assert answers[0]


@pytest.mark.parametrize("kind", ["delta", 1, None])
def test_another_kind_is_refused_by_name(kind):
    with pytest.raises(ValueError, match="output_kind must be a RequestOutputKind"):
        SamplingParams(output_kind=kind)
