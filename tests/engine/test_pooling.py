"""Requests that are answered with an embedding or logits of their prompt instead of tokens."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from helpers.adapted_models import mlx_lm_model
from helpers.disk_tiers import block_files, tiered
from helpers.drafting import eager_drafts
from helpers.engine_runs import (
    CONFIG,
    ask_alone,
    assert_nothing_held,
    greedy,
    make_engine,
    prompt,
    replays_of,
    run,
    small_model,
    tiny_models,
)
from helpers.model_zoo import make_from_config
from helpers.qwen3_helpers import load_model
from mlx.nn.layers.base import Module
from paged_testing.pure_metal import pure_metal

from mlx_paged.engine import compiled_decode
from mlx_paged.engine.engine import Engine
from mlx_paged.errors import ArgumentError, PromptTooLongError
from mlx_paged.models import qwen3
from mlx_paged.models.language_model import LanguageModel
from mlx_paged.models.mlx_lm.draft_head import LAYOUTS, DraftHead
from mlx_paged.models.mlx_lm.packed import PackedModel
from mlx_paged.models.mlx_lm.per_sequence import PerSequenceModel
from mlx_paged.options.sampling_params import PoolingParams

GOLDEN = Path(__file__).parents[1] / "golden" / "qwen3"
EMBEDDING = PoolingParams()
# Of numbers below 1 in float32, after two layers.
TOLERANCE = 2e-6


@cache
def model_of(kind: str) -> LanguageModel:
    ours, theirs = tiny_models()
    return ours if kind == "native" else PackedModel(theirs, CONFIG)


@cache
def row_of_mlx_lm(tokens: tuple[int, ...]) -> np.ndarray:
    """The last hidden row of a prompt, computed by mlx-lm in one go."""
    _, theirs = tiny_models()
    return np.array(theirs.model(mx.array([tokens]))[0, -1])


def embedding_of_mlx_lm(tokens: list[int], dimensions: int | None = None) -> np.ndarray:
    row = row_of_mlx_lm(tuple(tokens))[:dimensions]
    return row / np.linalg.norm(row)


def embed(
    engine: Engine, tokens: list[int], pooling: PoolingParams = EMBEDDING, **options: Any
) -> np.ndarray:
    engine.add_request("e", tokens, pooling, **options)
    return np.array(run(engine)["e"].pooled)


def difference(found: Any, expected: np.ndarray) -> float:
    assert np.shape(found) == expected.shape
    return float(np.abs(np.array(found) - expected).max())


@pytest.mark.parametrize("kind", ["native", "packed"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kv": "basic"},
        {"run_ahead": True, "max_num_batched_tokens": 16, "max_num_seqs": 4},
    ],
    ids=["together", "basic", "in chunks, one step ahead"],
)
def test_embeddings_are_the_last_rows_of_mlx_lm_beside_chats(kind: str, options: dict[str, Any]):
    engine = make_engine(model_of(kind), **options)
    chat = prompt(37, seed=1)
    engine.add_request("chat", chat, greedy(12))
    for length in (1, 2, 16, 33, 90):
        engine.add_request(str(length), prompt(length), EMBEDDING)
    # Its first 32 tokens are those of the chat.
    engine.add_request("hit", [*chat[:32], 5], EMBEDDING)
    outputs = run(engine)
    for length in (1, 2, 16, 33, 90):
        expected = embedding_of_mlx_lm(prompt(length))
        assert difference(outputs[str(length)].pooled, expected) < TOLERANCE
    assert difference(outputs["hit"].pooled, embedding_of_mlx_lm([*chat[:32], 5])) < TOLERANCE
    assert outputs["chat"].outputs[0].token_ids == ask_alone(model_of("native"), chat, greedy(12))
    assert_nothing_held(engine)


@pytest.mark.parametrize("case", ["gqa_tied", "narrow_heads_tied", "yarn_nested"])
def test_embeddings_are_the_hidden_rows_of_transformers(case: str):
    golden = mx.load(str(GOLDEN / case / "golden.safetensors"))
    model = load_model(GOLDEN / case)
    # There are more tokens than dimensions, so the hidden row follows from its logits.
    vocabulary = np.array(model.model.embed_tokens.weight, np.float64)
    row = np.linalg.lstsq(vocabulary, np.array(golden["logits"][-1], np.float64), rcond=None)[0]
    found = embed(make_engine(model), golden["token_ids"].tolist())
    assert difference(found, row / np.linalg.norm(row)) < 1e-5


def test_dimensions_are_cut_before_the_embedding_is_normalised():
    engine = make_engine(model_of("native"))
    row = row_of_mlx_lm(tuple(prompt(20)))
    found = embed(engine, prompt(20), PoolingParams(dimensions=8))
    assert difference(found, row[:8] / np.linalg.norm(row[:8])) < TOLERANCE
    found = embed(engine, prompt(20), PoolingParams(dimensions=8, normalize=False))
    assert difference(found, row[:8]) < TOLERANCE * np.abs(row).max()


def test_logits_of_tokens_are_those_of_the_next_token():
    engine = make_engine(model_of("native"))
    engine.add_request("e", prompt(9), EMBEDDING)
    engine.add_request("s", prompt(30), PoolingParams(token_ids=(7, 3)))
    _, theirs = tiny_models()
    logits = np.array(theirs(mx.array([prompt(30)]))[0, -1])
    assert difference(run(engine)["s"].pooled, logits[[7, 3]]) < TOLERANCE


def test_an_embedding_leaves_the_pool_as_it_was():
    engine = make_engine(model_of("native"))
    engine.add_request("chat", prompt(70), greedy(4))
    run(engine)
    cached = engine.cached_block_ids(prompt(70))
    before = engine.stats()
    output = run_one(engine, prompt(70)[:48] + prompt(100, seed=2))
    assert output.num_cached_tokens == 48
    after = engine.stats()
    assert after.num_cached_blocks == before.num_cached_blocks
    assert after.num_empty_blocks >= before.num_empty_blocks
    assert engine.cached_block_ids(prompt(70)) == cached
    assert engine.cached_block_ids(prompt(100, seed=2)) == []
    # Its blocks are taken before anything is evicted.
    assert after.num_evictions == 0
    assert_nothing_held(engine)


def run_one(engine: Engine, tokens: list[int], pooling: PoolingParams = EMBEDDING) -> Any:
    engine.add_request("e", tokens, pooling)
    return run(engine)["e"]


def test_only_shared_tokens_stay_in_the_prefix_cache():
    engine = make_engine(model_of("native"))
    shared = prompt(40)
    pooling = PoolingParams(token_ids=(1, 2), num_shared_tokens=len(shared))
    for number in range(3):
        engine.add_request(str(number), shared + prompt(50, seed=number), pooling)
    outputs = run(engine)
    # Two whole blocks of 16 tokens, which the others read in the step that fills them.
    assert [outputs[str(number)].num_cached_tokens for number in range(3)] == [0, 32, 32]
    assert engine.stats().num_cached_blocks == 2
    logits = np.array(tiny_models()[1](mx.array([shared + prompt(50, seed=2)]))[0, -1])
    assert difference(outputs["2"].pooled, logits[[1, 2]]) < TOLERANCE


def test_the_sequence_that_a_basic_cache_keeps_stays_there():
    engine = make_engine(model_of("native"), kv="basic")
    engine.add_request("chat", prompt(40), greedy(3))
    run(engine)
    run_one(engine, [*prompt(40)[:32], 7])
    engine.add_request("again", prompt(40), greedy(3))
    assert run(engine)["again"].num_cached_tokens == 32


def test_embeddings_are_preempted_and_recomputed():
    engine = make_engine(
        model_of("native"), kv_cache_bytes="9blocks", max_num_batched_tokens=16, max_num_seqs=4
    )
    engine.add_request("long", prompt(120), EMBEDDING, priority=1)
    for _ in range(3):
        engine.step()
    engine.add_request("urgent", prompt(110), EMBEDDING)
    outputs = run(engine)
    assert engine.stats().num_preemptions == 1
    assert difference(outputs["long"].pooled, embedding_of_mlx_lm(prompt(120))) < TOLERANCE
    assert difference(outputs["urgent"].pooled, embedding_of_mlx_lm(prompt(110))) < TOLERANCE
    assert_nothing_held(engine)


def test_many_embeddings_of_a_user_delay_no_other():
    engine = make_engine(model_of("native"), max_num_batched_tokens=32, max_num_seqs=4)
    for number in range(40):
        engine.add_request(f"a{number}", prompt(60, seed=number), EMBEDDING, user="ann")
    engine.step()
    engine.add_request("b", prompt(60, seed=50), EMBEDDING, user="bob")
    assert list(run(engine)).index("b") < 8


def test_an_embedding_is_aborted_between_two_chunks():
    engine = make_engine(model_of("native"), max_num_batched_tokens=64)
    engine.add_request("e", prompt(300), EMBEDDING)
    engine.step()
    engine.abort("e")
    [output] = run(engine).values()
    assert output.pooled is None and output.outputs[0].finish_reason == "abort"
    assert_nothing_held(engine)


def test_a_step_that_fails_ends_no_other_request(monkeypatch: pytest.MonkeyPatch):
    engine, fails = make_engine(model_of("native")), [True]
    launch = engine.runner.launch

    def failing(*args: Any) -> Any:
        result = launch(*args)
        if fails.pop() if fails else False:
            raise RuntimeError("planted")
        return result

    monkeypatch.setattr(engine.runner, "launch", failing)
    for number in range(3):
        engine.add_request(str(number), prompt(20, seed=number), EMBEDDING)
    outputs = run(engine)
    for number in range(3):
        expected = embedding_of_mlx_lm(prompt(20, seed=number))
        assert difference(outputs[str(number)].pooled, expected) < TOLERANCE


def test_results_that_are_not_finite_are_an_error():
    mx.random.seed(0)
    model = qwen3.Model(qwen3.ModelArgs.from_dict(CONFIG))
    model.model.norm.weight = model.model.norm.weight * float("inf")
    engine = make_engine(model)
    engine.add_request("e", prompt(5), EMBEDDING)
    output = run(engine)["e"]
    assert output.pooled is None and "not finite" in str(output.error)


def test_embeddings_run_beside_drafts_of_a_head():
    model = small_model(head_dim=32)
    head = DraftHead(model, LAYOUTS["qwen3"])
    mx.eval(head.parameters())
    engine, plain = make_engine(model, draft_model=head), make_engine(model)
    engine.scheduler.speculation = eager_drafts(engine)
    engine.add_request("chat", prompt(37, seed=1), greedy(12))
    engine.step()
    for length in (5, 40):
        engine.add_request(str(length), prompt(length), EMBEDDING)
    outputs = run(engine)
    for length in (5, 40):
        expected = embed(plain, prompt(length))
        assert difference(outputs[str(length)].pooled, expected) < TOLERANCE
    assert engine.stats().spec_decoding.num_draft_tokens
    chat = ask_alone(model, prompt(37, seed=1), greedy(12))
    assert outputs["chat"].outputs[0].token_ids == chat


def test_a_recurrent_model_gives_embeddings():
    model: Module = mlx_lm_model("qwen3_next")
    config = vars(model.args) | {"model_type": "qwen3_next"}
    expected = np.array(model.model(mx.array([prompt(40)]))[0, -1].astype(mx.float32))
    engine = make_engine(PackedModel(model, config), max_num_batched_tokens=64)
    engine.add_request("chat", prompt(20, seed=3), greedy(6))
    engine.add_request("e", prompt(40), EMBEDDING)
    found = run(engine)["e"].pooled
    assert difference(found, expected / np.linalg.norm(expected)) < 1e-3
    assert engine.stats().num_checkpoints <= 1


def test_decodes_are_replayed_but_beside_the_end_of_an_embedding(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(compiled_decode, "NUM_BUILT_FIRST", 0)
    chat, model = prompt(37, seed=1), small_model(head_dim=32)
    expected = ask_alone(model, chat, greedy(12))
    embedding = embed(make_engine(model), [*chat[:32], 5])
    with pure_metal():
        engine = make_engine(model, run_ahead=True)
        replays = replays_of(engine)
        engine.add_request("chat", chat, greedy(12))
        for _ in range(4):
            engine.step()
        # All but one of its tokens are found, so the step has one token of each request.
        engine.add_request("hit", [*chat[:32], 5], EMBEDDING)
        outputs = run(engine)
    assert outputs["hit"].num_cached_tokens == 32
    assert outputs["chat"].outputs[0].token_ids == expected
    assert difference(outputs["hit"].pooled, embedding) < TOLERANCE
    # The prompt, the embedding, which asks for no replay, and the decodes.
    assert replays == [False] + [True] * 10


def test_embeddings_read_a_tier_and_write_nothing(tmp_path: Path):
    model = model_of("native")
    with tiered(model, tmp_path) as engine:
        engine.add_request("chat", prompt(70), greedy(4))
        run(engine)
    files = block_files(tmp_path)
    assert files
    with tiered(model, tmp_path) as engine:
        tokens = prompt(70)[:64] + prompt(60, seed=4)
        output = run_one(engine, tokens)
        assert output.num_read_tokens == output.num_cached_tokens == 64
        assert difference(output.pooled, embedding_of_mlx_lm(tokens)) < TOLERANCE
    assert block_files(tmp_path) == files


@pytest.mark.parametrize("seed", [1, 2])
def test_any_mix_of_embeddings_scores_and_chats(seed: int):
    """Preempted, swapped, aborted and failed steps at random, on a small pool."""
    rng, model = random.Random(seed), model_of("native")
    engine = make_engine(
        model,
        kv_cache_bytes="24blocks",
        swap_bytes="8blocks",
        max_num_batched_tokens=48,
        max_num_seqs=6,
        run_ahead=seed == 2,
    )
    launch = engine.runner.launch

    def failing(*args: Any) -> Any:
        result = launch(*args)
        if rng.random() < 0.05:
            raise RuntimeError("planted")
        return result

    engine.runner.launch = failing  # type: ignore[method-assign]
    shared, asked, outputs = prompt(40), {}, {}
    kinds = [EMBEDDING, PoolingParams(token_ids=(7, 3), num_shared_tokens=40), greedy(6)]
    while len(asked) < 40 or engine.has_unfinished_requests():
        if len(asked) < 40 and rng.random() < 0.6:
            tokens = shared[: rng.choice([0, 16, 40])] + prompt(
                rng.randrange(1, 150), rng.randrange(9)
            )
            name = str(len(asked))
            asked[name] = tokens, rng.choice(kinds)
            user = rng.choice("ab")
            engine.add_request(name, *asked[name], priority=rng.randrange(2), user=user)
        if asked and rng.random() < 0.03:
            engine.abort(rng.choice(list(asked)))
        outputs |= {output.request_id: output for output in engine.step() if output.finished}
    assert_nothing_held(engine)
    assert engine.scheduler.num_preemptions and len(outputs) == 40
    num_pooled = 0
    for name, (tokens, params) in asked.items():
        output, [completion] = outputs[name], outputs[name].outputs
        if completion.finish_reason in ("abort", "error"):
            assert output.pooled is None
        elif params is EMBEDDING:
            assert difference(output.pooled, embedding_of_mlx_lm(tokens)) < TOLERANCE
        elif isinstance(params, PoolingParams):
            logits = np.array(tiny_models()[1](mx.array([tokens]))[0, -1])
            assert difference(output.pooled, logits[[7, 3]]) < TOLERANCE
        else:
            assert output.pooled is None and len(completion.token_ids) == 6
        num_pooled += output.pooled is not None
    assert num_pooled > 15


def test_prompts_may_fill_the_whole_context():
    engine = make_engine(model_of("native"), max_model_len=32)
    expected = embedding_of_mlx_lm(prompt(32))
    assert difference(embed(engine, prompt(32)), expected) < TOLERANCE
    with pytest.raises(PromptTooLongError, match="33 tokens is too long: it may have at most 32"):
        engine.add_request("e", prompt(33), EMBEDDING)


def test_what_can_not_be_pooled_is_refused_by_name():
    engine = make_engine(model_of("native"))
    for pooling, words in (
        (PoolingParams(dimensions=33), "dimensions must be at most 32, .* got 33"),
        (PoolingParams(token_ids=(61,)), "token_ids has token id 61"),
    ):
        with pytest.raises(ArgumentError, match=words):
            engine.add_request("e", prompt(3), pooling)
    with pytest.raises(ArgumentError, match="dimensions must be a whole number"):
        PoolingParams(dimensions=0)
    other = make_from_config(CONFIG | {"model_type": "llama"})
    one_by_one = make_engine(PerSequenceModel(other, CONFIG | {"model_type": "llama"}))
    with pytest.raises(ArgumentError, match=r"per sequence. gives no embeddings"):
        one_by_one.add_request("e", prompt(3), EMBEDDING)
    # Logits it has.
    assert len(embed(one_by_one, prompt(3), PoolingParams(token_ids=(1, 2)))) == 2


def test_embeddings_are_counted_as_prompts_and_not_as_tokens():
    engine = make_engine(model_of("native"))
    engine.add_request("chat", prompt(10), greedy(3))
    run_one(engine, prompt(20))
    stats, latencies = engine.stats(), engine.latencies
    assert stats.num_prompt_tokens == 30 and stats.num_generation_tokens == 3
    assert stats.num_finished["stop"] == 1 and stats.num_finished["length"] == 1
    assert latencies.time_to_first_token.count == latencies.e2e_latency.count == 2
    assert latencies.queue_time.count == latencies.prefill_time.count == 2
    assert latencies.generation_tokens.count == latencies.max_generation_tokens.count == 1
