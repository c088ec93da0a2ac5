"""A draft model whose K/V live in the blocks of the model that it makes drafts for."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from helpers.drafting import eager_drafts
from helpers.engine_runs import (
    CONFIG,
    VOCAB_SIZE,
    answer,
    ask_alone,
    greedy,
    make_engine,
    prompt,
    run,
    sampled,
)
from helpers.fast_lane import mostly_slow
from helpers.workloads import Workload, assert_all_same_but_aborts, assert_same
from mlx.utils import tree_flatten, tree_map
from paged_testing.lazy_metal import lazy_metal

from mlx_paged import LLM, StructuredOutputsParams, demo_model_path, generate
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.request import PENDING_TOKEN
from mlx_paged.engine.scheduling.batch import Batch
from mlx_paged.engine.speculation.draft_model import DraftState
from mlx_paged.engine.speculation.speculation import Speculation, StepCost
from mlx_paged.loading import load_draft_model
from mlx_paged.models import qwen3
from mlx_paged.request import RequestOutput

FACTS = "The code of apple is 4821. " * 4


def perturbed(model: qwen3.Model, by: float = 0.02, **config: Any) -> qwen3.Model:
    """A model with the weights of another one, a little changed; layers may be left out."""
    mx.random.seed(1)
    arguments = {**vars(model.args), **config}
    other = qwen3.Model(type(model.args)(**arguments))
    names = {name for name, _ in tree_flatten(other.parameters())}
    kept = [(name, value) for name, value in tree_flatten(model.parameters()) if name in names]
    other.load_weights(kept)
    noise = lambda w: w + by * mx.random.normal(w.shape) * mx.abs(w).mean()  # noqa: E731
    other.update(tree_map(noise, other.parameters()))
    mx.eval(other.parameters())
    return other


@pytest.fixture(scope="module")
def draft_model(model: qwen3.Model) -> qwen3.Model:
    """Of one layer less, and other weights."""
    return perturbed(model, num_hidden_layers=1)


# Each way to step meets draft models of one and of two layers.
@mostly_slow(("seed", "is_ahead"), [(0, False), (1, True)], quick=(1,))
def test_requests_of_every_kind_get_the_same_as_without(
    model: qwen3.Model, is_ahead: bool, seed: int
):
    workload = Workload(seed + 40, 20, VOCAB_SIZE)
    plain = workload.run(model, run_ahead=False)
    draft_model = perturbed(model, by=0.1, num_hidden_layers=1 + seed % 2)
    drafting = workload.run(
        model, draft_model=draft_model, speculation=eager_drafts, run_ahead=is_ahead
    )
    assert_all_same_but_aborts(drafting, plain)
    stats = drafting.engine.stats()
    assert 0 < stats.spec_decoding.num_accepted_tokens < stats.spec_decoding.num_draft_tokens


@pytest.mark.slow
def test_kernels_run_both_models(kernel_model: qwen3.Model):
    workload = Workload(50, 15, VOCAB_SIZE)
    plain = workload.run(kernel_model, run_ahead=False)
    with lazy_metal(computes=True):
        drafting = workload.run(
            kernel_model, draft_model=perturbed(kernel_model), speculation=eager_drafts
        )
    assert drafting.engine.cache.backend.name == "metal"
    assert_all_same_but_aborts(drafting, plain)


@pytest.mark.parametrize("params", [greedy(40), sampled(3, 40), sampled(3, 40, top_p=0.8, n=2)])
def test_a_model_that_makes_its_own_drafts_is_always_right(model: qwen3.Model, params: Any):
    """It sees what it would see on its own after prefix hits, chunks, forks and catching up."""
    engine = make_engine(model, draft_model=model, max_num_seqs=4, max_num_batched_tokens=16)
    engine.scheduler.speculation = eager_drafts(engine)
    first: dict[str, RequestOutput] = {}
    for name in ("first", "second"):  # the second one finds the prompt of the first
        engine.add_request(name, prompt(50), params)
        first |= run(engine)
    stats = engine.stats()
    assert stats.num_hit_tokens > 0
    assert 20 < stats.spec_decoding.num_accepted_tokens == stats.spec_decoding.num_draft_tokens
    assert_same(first["second"], first["first"])


# Grammars

WORDS = StructuredOutputsParams(regex="(name: [a-z]{1,9}, [0-9]{2}. ){30}")


@pytest.mark.parametrize("reasons", [False, True], ids=["structured", "reasoning first"])
def test_drafts_of_a_model_keep_to_the_grammar(demo: tuple[Any, Any], reasons: bool):
    """The model is its own draft model, so each draft is right if its mask is, at each depth and
    where the structure begins. "name" is forced, which takes no draft model.
    """
    model, tokenizer = demo
    words = WORDS
    if reasons:
        end = ask_alone(model, tokenizer.encode(FACTS), greedy(9))[6:8]
        words = dataclasses.replace(WORDS, begin_after=end)
    asks = {
        "greedy": greedy(40, structured_outputs=words),
        "sampled": sampled(3, 40, structured_outputs=words, top_p=0.9, n=2),
        "free": sampled(4, 40),
        "penalised": greedy(40, structured_outputs=words, presence_penalty=0.3),
    }

    def ask_all(engine: Engine) -> dict[str, RequestOutput]:
        for name, params in asks.items():
            engine.add_request(name, FACTS, params)
        return run(engine)

    plain = ask_all(make_engine(model, tokenizer))
    engine = make_engine(model, tokenizer, draft_model=model)
    engine.scheduler.speculation = eager_drafts(engine)
    launch, num_forced = engine.runner.launch, 0

    def counting(batch: Batch, awaited: Any) -> mx.array:
        nonlocal num_forced
        num_forced += sum(PENDING_TOKEN not in part.draft_token_ids for part in batch.drafted)
        return launch(batch, awaited)

    engine.runner.launch = counting  # type: ignore[method-assign]
    drafting = ask_all(engine)
    for name in asks:
        assert_same(drafting[name], plain[name])
        for each in drafting[name].outputs:
            drafts = each.spec_decoding
            assert drafts.num_accepted_tokens > 10
            assert name == "penalised" or drafts.acceptance_rate == 1
    assert num_forced > 4


def test_drafts_are_not_read_within_a_step_without_a_grammar(
    model: qwen3.Model, monkeypatch: pytest.MonkeyPatch
):
    engine = make_engine(model, draft_model=model)
    engine.scheduler.speculation = eager_drafts(engine)
    launch, read, is_launching = engine.runner.launch, DraftState.read_drafts, False

    def launching(batch: Batch, awaited: Any) -> mx.array:
        nonlocal is_launching
        is_launching = True
        logits = launch(batch, awaited)
        is_launching = False
        return logits

    def reading(state: DraftState) -> list[int]:
        assert not is_launching
        return read(state)

    engine.runner.launch = launching  # type: ignore[method-assign]
    monkeypatch.setattr(DraftState, "read_drafts", reading)
    engine.add_request("a", prompt(20), sampled(1, 30, logit_bias={3: 2.0}, min_tokens=9))
    run(engine)
    stats = engine.stats().spec_decoding
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 10


@pytest.mark.parametrize("swap", [True, False], ids=["swap", "recompute"])
def test_preempted_requests_keep_the_draft_models_context(model: qwen3.Model, swap: bool):
    engine = make_engine(
        model,
        draft_model=model,
        kv_cache_bytes="9blocks",
        swap_bytes="20blocks" if swap else 0,
        enable_prefix_caching=False,
        watermark=0,
    )
    engine.scheduler.speculation = eager_drafts(engine)
    asks = {"a": (prompt(40), greedy(60)), "b": (prompt(41), greedy(50))}
    for name, (tokens, params) in asks.items():
        engine.add_request(name, tokens, params)
    outputs = run(engine)
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert stats.spec_decoding.num_accepted_tokens == stats.spec_decoding.num_draft_tokens
    for name, (tokens, params) in asks.items():
        assert outputs[name].outputs[0].token_ids == ask_alone(model, tokens, params)


def test_a_step_that_fails_is_run_again(model: qwen3.Model, draft_model: qwen3.Model):
    engine = make_engine(model, draft_model=draft_model)
    engine.scheduler.speculation = eager_drafts(engine)
    drafter = engine.runner.draft_model
    number, calls = iter(range(1000)), drafter.model

    def failing(*args: Any) -> mx.array:
        if next(number) % 5 == 3:
            raise RuntimeError("now and then")
        return calls(*args)

    drafter.model = failing  # type: ignore[assignment]
    for name in ("a", "b"):
        engine.add_request(name, prompt(20, seed=ord(name)), greedy(20))
    outputs = run(engine)
    for name in ("a", "b"):
        completion = outputs[name].outputs[0]
        assert completion.token_ids == ask_alone(model, prompt(20, seed=ord(name)), greedy(20))


def with_drafts_that_do_not_pay(model: qwen3.Model) -> Engine:
    mx.random.seed(5)
    other = qwen3.Model(qwen3.ModelArgs.from_dict(CONFIG))  # knows nothing
    engine = make_engine(model, draft_model=other, kv_cache_bytes="400blocks")
    engine.scheduler.speculation = Speculation(
        engine.runner.draft_model, 3, StepCost.linear(1, 0.1), StepCost.linear(0.2, 0.01)
    )
    return engine


def test_what_does_not_pay_is_tried_less_and_less_but_not_given_up(model: qwen3.Model):
    engine = with_drafts_that_do_not_pay(model)
    engine.add_request("a", prompt(20), greedy(400))
    drafted: list[int] = []
    while engine.has_unfinished_requests():
        engine.step()
        drafted.append(engine.stats().spec_decoding.num_draft_tokens)
    assert drafted[20] > 0 and drafted[20] < drafted[-1] < 100


def test_the_next_turn_of_a_conversation_knows_what_does_not_pay(model: qwen3.Model):
    engine = with_drafts_that_do_not_pay(model)
    first = answer(engine, prompt(50), greedy(20)).outputs[0]
    assert first.spec_decoding.num_draft_tokens > 0
    for history in (prompt(50) + first.token_ids, prompt(50)):  # without its answer, too
        later = answer(engine, history + prompt(20, seed=9), greedy(20)).outputs[0]
        assert later.spec_decoding.num_draft_tokens == 0
    new = answer(engine, prompt(50, seed=7), greedy(20)).outputs[0]
    assert new.spec_decoding.num_draft_tokens > 0


def test_its_kv_count_in_the_budget(model: qwen3.Model, draft_model: qwen3.Model):
    alone = make_engine(model, kv_cache_bytes="1M").cache.config
    both = make_engine(model, kv_cache_bytes="1M", draft_model=draft_model).cache.config
    assert both.nbytes_per_token == alone.nbytes_per_token * 3 // 2
    assert both.nbytes <= 2**20 and both.num_blocks < alone.num_blocks


# At the doors


def test_what_can_not_make_drafts_is_refused_by_name(model: qwen3.Model, tmp_path: Path):
    other = qwen3.Model(qwen3.ModelArgs.from_dict(CONFIG | {"vocab_size": 62}))
    with pytest.raises(ValueError, match="draft_model has a vocabulary of 62 tokens, the model"):
        make_engine(model, draft_model=other)
    with pytest.raises(ValueError, match="draft_model must be one that"):
        make_engine(model, draft_model="a text")
    with pytest.raises(ValueError, match="draft_model needs kv='paged'"):
        make_engine(model, draft_model=model, kv="basic")
    with pytest.raises(ValueError, match="num_draft_tokens must be at least 1 with a draft model"):
        make_engine(model, draft_model=model, num_draft_tokens=0)
    with pytest.raises(ValueError, match=r"\[load\] draft_model: "):
        load_draft_model(tmp_path / "nothing", None)
    with pytest.raises(ValueError, match="draft_model must be a folder"):
        load_draft_model(7, None)  # type: ignore[arg-type]


def test_another_tokenizer_is_refused(demo: tuple[Any, Any]):
    _, tokenizer = demo
    tokenizer._tokenizer.add_tokens(["<new>"])
    with pytest.raises(ValueError, match="another tokenizer than the model: 1 entries"):
        load_draft_model(demo_model_path(), tokenizer)


def test_every_door_takes_one(demo: tuple[Any, Any], tmp_path: Path):
    model, tokenizer = demo
    plain = generate(model, tokenizer, FACTS, max_tokens=30)
    assert generate(model, tokenizer, FACTS, max_tokens=30, draft_model=model) == plain
    # The model's own folder would stand for the head in it.
    copied = shutil.copytree(demo_model_path(), tmp_path / "copied")
    llm = LLM(demo_model_path(), draft_model=copied, kv_cache_bytes="100blocks")
    llm.engine.scheduler.speculation = eager_drafts(llm.engine)
    (output,) = llm.generate(FACTS, greedy(30))
    assert output.outputs[0].text == plain
    assert output.outputs[0].spec_decoding.num_accepted_tokens > 10
