"""A deterministic engine: the bits of an answer are those of its request alone in a new engine,
whatever else runs. The workloads are random, and faults that are planted are seen in them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.deterministic_workloads import (
    CHUNK,
    alone,
    assert_same_bits,
    compare,
    let_mlx_vary,
    model_of,
    shorten_steps,
    workload,
)
from helpers.engine_runs import greedy, make_engine, prompt, run, sampled
from helpers.model_zoo import make
from helpers.workloads import Ask, Workload
from mlx_lm.tuner.utils import linear_to_lora_layers
from paged_testing import soak

from mlx_paged import LLM, AsyncEngine
from mlx_paged.engine import build
from mlx_paged.engine.scheduling import prefix_cache, scheduler
from mlx_paged.engine.scheduling.batch import Batch
from mlx_paged.engine.scheduling.prefix_cache import PrefixCache
from mlx_paged.errors import ArgumentError
from mlx_paged.models.deterministic import deterministic_matmul
from mlx_paged.request import RequestOutput
from mlx_paged.snapshots import SnapshotError

pytestmark = pytest.mark.usefixtures("short_steps")


@pytest.fixture
def short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_steps(monkeypatch)
    let_mlx_vary(monkeypatch)


@pytest.mark.parametrize(
    ("kind", "seed", "changes"),
    [
        pytest.param("16 bits", 1, {"num_draft_tokens": 5}, id="drafts and swapping"),
        pytest.param(
            "windows",
            1,
            {"num_draft_tokens": 5, "run_ahead": True, "kv_format": 8},
            id="windows and quantised K and V",
        ),
        pytest.param(
            "16 bits",
            5,
            {"window": 24, "num_sink_tokens": 8},
            id="streaming and replays",
            marks=pytest.mark.slow,
        ),
        pytest.param("4 bits", 1, {}, id="4 bits", marks=pytest.mark.slow),
    ],
)
def test_every_answer_has_the_bits_of_its_request_alone(
    kind: str, seed: int, changes: dict[str, Any]
):
    sizes = (7, 12) if "num_draft_tokens" in changes else (8, 16)
    asked = workload(seed, *sizes, kind, **changes)
    stats = compare(kind, asked).engine.stats()
    # All that it is about has happened.
    assert stats.num_preemptions > 0 and stats.num_hit_tokens > 0
    assert (stats.spec_decoding.num_accepted_tokens > 20) == ("num_draft_tokens" in changes)


class DeterministicSoak(soak.Soak):
    """With steps that fail or are interrupted; the memory that plain MLX takes for rows is not
    checked.
    """

    def _run_alone(self, request: soak.SoakRequest) -> RequestOutput:
        params = {
            each.name: getattr(request.params, each.name)
            for each in dataclasses.fields(request.params)
        }
        return alone("16 bits", Ask(request.prompt, params, comes_at=0), {"block_size": 8})


@pytest.mark.slow
@pytest.mark.parametrize("num_drafts", [0, 5])
def test_steps_that_fail_change_no_token(num_drafts: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(soak, "MAX_NEW_TOKENS", 16)
    monkeypatch.setattr(soak, "slack_nbytes", lambda *_: 2**30)
    options = {
        "deterministic": True,
        "max_num_batched_tokens": None,
        "kv_cache_bytes": "30blocks",
        "swap_bytes": "20blocks" if num_drafts else 0,
        "run_ahead": not num_drafts,
    }
    made = DeterministicSoak(model_of("16 bits"), 3, num_drafts=num_drafts, engine_options=options)
    made.slack_at_rest = 2**30
    made.run(0, 40)
    assert made.counts["failed steps"] + made.counts["interruptions"] > 3
    assert made.engine.stats().num_preemptions > 0
    for number in range(0, 40, 3):
        made.check_tokens(soak.make_request(made.seed, number, 61))


def mlx_for_more_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of more than four rows are MLX's."""
    monkeypatch.setattr(
        build,
        "deterministic_matmul",
        lambda model, num_rows, name: deterministic_matmul(model, 4, name),
    )


def runs_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafts of a request attend in one run."""
    monkeypatch.setattr(build, "MAX_RUN_TOKENS", 0)


def a_part_of_a_chunk_is_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    def longest_hit(self: Any, completion: Any) -> Any:
        num_tokens = prefix_cache._num_findable_tokens(completion)
        return self._manager.get_computed_blocks(completion.block_hashes, num_tokens)

    monkeypatch.setattr(PrefixCache, "_longest_hit", longest_hit)


def blocks_of_answers_are_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(self: Any, *args: Any) -> None:
        made(self, *args)
        self._hit_size = self._block_size

    made = PrefixCache.__init__
    monkeypatch.setattr(PrefixCache, "__init__", init)


def chunks_run_beside_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Batch, "holds", lambda self, completion: True)
    monkeypatch.setattr(Batch, "is_full", False)


@pytest.mark.parametrize(
    "fault",
    [
        mlx_for_more_rows,
        runs_together,
        a_part_of_a_chunk_is_hit,
        blocks_of_answers_are_hit,
        chunks_run_beside_rows,
    ],
)
def test_a_planted_fault_is_seen(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
):
    asked = workload(1, 7, 12, num_draft_tokens=5)
    for ask in asked.asks.values():
        alone("16 bits", ask, asked.options)
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        compare("16 bits", asked)


def test_a_step_has_one_chunk_or_rows_of_those_who_answer(monkeypatch: pytest.MonkeyPatch):
    batches: list[Batch] = []
    schedule = scheduler.Scheduler.schedule
    monkeypatch.setattr(
        scheduler.Scheduler,
        "schedule",
        lambda self, *args, **options: (
            batches.append(schedule(self, *args, **options)) or batches[-1]
        ),
    )
    engine = make_engine(model_of("16 bits"), deterministic=True, max_num_seqs=6)
    engine.add_request("answer", prompt(5), greedy(20))
    engine.step()
    engine.add_request("prompt", prompt(3 * CHUNK + 7), greedy(3))
    run(engine)
    shapes = [
        [(part.completion.request_id, part.start, part.num_new_tokens) for part in batch.scheduled]
        for batch in batches
        if batch.scheduled
    ]
    chunks = [shape for shape in shapes if shape[0][0] == "prompt" and shape[0][2] > 1]
    assert chunks == [
        *([("prompt", start, CHUNK)] for start in (0, CHUNK, 2 * CHUNK)),
        [("prompt", 3 * CHUNK, 7)],
    ]
    # The answer waits for one chunk at a time.
    places = [index for index, shape in enumerate(shapes) if shape in chunks]
    assert all(after - before == 2 for before, after in itertools.pairwise(places))
    assert all(len(shape) == 1 or {new for *_, new in shape} == {1} for shape in shapes)


def test_a_second_turn_finds_the_whole_chunks_of_the_first_prompt():
    engine = make_engine(model_of("16 bits"), deterministic=True, max_num_seqs=6)
    first = prompt(2 * CHUNK + 9)
    engine.add_request("first", first, greedy(CHUNK - 5))
    answer = run(engine)["first"].outputs[0].token_ids
    second = [*first, *answer, *prompt(6)]
    engine.add_request("second", second, greedy(3, logprobs=1))
    found = run(engine)["second"]
    # Neither the rest of the first prompt nor its answer, whose K/V have the bits of decodes.
    assert found.num_cached_tokens == 2 * CHUNK
    ask = Ask(second, {"max_tokens": 3, "logprobs": 1}, comes_at=0)
    assert_same_bits(found, alone("16 bits", ask, {"block_size": 16}))


def test_a_whole_prompt_is_hit_up_to_its_last_chunk():
    engine = make_engine(model_of("16 bits"), deterministic=True, max_num_seqs=6)
    for name in ("first", "again"):
        engine.add_request(name, prompt(2 * CHUNK), greedy(2))
        # The last chunk is computed in any case, for the logits of its last token.
        assert run(engine)[name].num_cached_tokens == (CHUNK if name == "again" else 0)


def test_preempted_answers_are_replayed_where_there_is_no_swap_space():
    asks = {
        str(number): Ask(prompt(20 + number), {"max_tokens": 24, "logprobs": 1}, comes_at=0)
        for number in range(3)
    }
    asked = Workload(0, 0, 61, asks)
    asked.options = {
        "deterministic": True,
        "block_size": 8,
        "kv_cache_bytes": "11blocks",
        "swap_bytes": 0,
        "max_num_seqs": 6,
    }
    stats = compare("16 bits", asked).engine.stats()
    assert stats.num_preemptions > 1 and stats.num_swapped_tokens == 0


def test_a_head_changes_no_bit():
    asks = {
        str(number): Ask(prompt(length), {"max_tokens": 4, "logprobs": 1}, comes_at=0)
        for number, length in enumerate((34, 5))
    }
    asked = workload(0, 0, 0, "head", num_draft_tokens=3)
    asked.asks = asks
    assert compare("head", asked).engine.stats().spec_decoding.num_draft_tokens > 0


def test_blocks_on_disk_are_those_of_deterministic_engines(tmp_path: Path):
    params, tokens = {"max_tokens": 4, "logprobs": 1}, prompt(3 * CHUNK)
    cached = []
    for options in ({}, {"deterministic": True}, {"deterministic": True}, {"matmul": "rows"}):
        with LLM(model_of("16 bits"), max_num_seqs=6, cache_dir=tmp_path, **options) as llm:
            (output,) = llm.generate([tokens], sampled(1, **params))
            cached.append(output.num_cached_tokens)
        if "deterministic" in options:
            ask = Ask(tokens, {**params, "temperature": 1.0, "seed": 1}, comes_at=0)
            assert_same_bits(output, alone("16 bits", ask, {"block_size": 16}))
    assert cached == [0, 0, 2 * CHUNK, 0]


def test_snapshots_of_other_engines_are_refused(tmp_path: Path):
    tokens = prompt(2 * CHUNK + 1)
    for name, options in {"ours": {"deterministic": True}, "theirs": {}}.items():
        engine = make_engine(model_of("16 bits"), max_num_seqs=6, **options)
        engine.add_request("a", tokens, greedy(2))
        run(engine)
        engine.save_snapshot(tmp_path / name, tokens)
    engine = make_engine(model_of("16 bits"), deterministic=True, max_num_seqs=6)
    engine.load_snapshot(tmp_path / "ours")
    engine.add_request("a", tokens, greedy(2))
    assert run(engine)["a"].num_cached_tokens == 2 * CHUNK
    with pytest.raises(SnapshotError, match="that this deterministic engine would compute"):
        engine.load_snapshot(tmp_path / "theirs")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"matmul": "mlx"}, r"^\[engine\] matmul can't be combined with deterministic: MLX adds"),
        ({"kv": "basic"}, "kv can't be combined with deterministic: .*use kv='paged'"),
        (
            {"max_num_seqs": 65},
            "max_num_seqs can't .* and up to 12 rows; leave it out, or at most 12",
        ),
        ({"max_num_batched_tokens": 2048}, "its steps are chunks of 32 tokens .*leave it out"),
        ({"prefill_step_seconds": 1.0}, "prefill_step_seconds can't be combined"),
        ({"token_budgets": [(0, 1, 1)]}, "token_budgets can't be combined"),
        ({"deterministic": "yes"}, "deterministic must be True or False"),
    ],
)
def test_options_that_conflict_are_refused_by_name(options: dict[str, Any], reason: str):
    with pytest.raises(ArgumentError, match=reason):
        make_engine(model_of("16 bits"), **{"deterministic": True, **options})


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("mixtral", "MLX multiplies 6 of its linear layers \\(experts\\)"),
        ("mamba2", "its recurrent layers compute several tokens in another order than one"),
        ("gpt2", "it has a matmul of its own \\(Matmul\\)"),
        ("stablelm", "it runs one sequence at a time"),
        ("longcat_flash", "of its linear layers \\(a matrix for each head\\)"),
    ],
)
def test_models_whose_rows_may_vary_are_refused_by_what_varies(architecture: str, reason: str):
    with pytest.raises(
        ArgumentError, match=f"can't be promised for this {architecture}: .*{reason}"
    ):
        make_engine(make(architecture), deterministic=True, max_num_seqs=6)


def test_layers_of_mlx_lms_adapters_are_refused():
    model = make("llama")
    linear_to_lora_layers(model, 1, {"rank": 4, "scale": 2.0, "dropout": 0.0})
    with pytest.raises(ArgumentError, match="a LoRALinear, has a matrix that it may multiply"):
        make_engine(model, deterministic=True, max_num_seqs=6)


def test_an_engine_that_steps_by_itself_sets_no_seconds_for_its_steps():
    with AsyncEngine(model_of("16 bits"), deterministic=True, max_num_seqs=6) as engine:
        *_, last = engine.stream(prompt(CHUNK + 3), greedy(3, logprobs=1))
    ask = Ask(prompt(CHUNK + 3), {"max_tokens": 3, "logprobs": 1}, comes_at=0)
    assert_same_bits(last, alone("16 bits", ask, {"block_size": 16}))
