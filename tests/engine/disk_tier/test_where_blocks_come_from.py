"""K/V that came from a file never reach a folder: what a folder holds is what an engine without
files computes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.adapted_models import RECURRENT, adapted_model, greedy_answer
from helpers.disk_tiers import block_files, flush, tier_stats, tiered
from helpers.engine_runs import (
    CONFIG,
    answer,
    ask_alone,
    greedy,
    livelier_model,
    make_engine,
    prompt,
    run,
)
from helpers.fast_lane import mostly_slow
from helpers.foreign_kv import (
    BLOCK_SIZE,
    OPTIONS,
    Play,
    assert_equal_kv,
    group_of,
    kv_of,
    kv_of_tokens,
    prompt_cache_of,
    rewritten,
    scale,
    scaled,
    snapshot_of,
    states_of_tokens,
    unchanged,
)
from helpers.windowed_models import lively_model_and_options
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3 as mlx_lm_qwen3
from safetensors import safe_open
from safetensors.numpy import save_file

from mlx_paged.block_store import CacheFolder
from mlx_paged.cache import Sequences
from mlx_paged.core import hash_token_blocks
from mlx_paged.core.tier import STATES, HostMemory
from mlx_paged.engine.engine import Engine
from mlx_paged.models import identity
from mlx_paged.models.kv_cache import make_kv_cache
from mlx_paged.models.run_step import run_step
from mlx_paged.ops.reference import ReferenceBackend
from mlx_paged.snapshots import SnapshotError, save_snapshot


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    """Ours and mlx-lm's; mlx-lm's has other weights."""
    # With two layers, K/V that are computed after foreign ones would be as if computed after ours.
    config = {**CONFIG, "num_hidden_layers": 3}
    ours = livelier_model(config)
    theirs = mlx_lm_qwen3.Model(mlx_lm_qwen3.ModelArgs.from_dict(config))
    theirs.load_weights(tree_flatten(ours.parameters()))
    return ours, scaled(theirs)


def tokens_of(folder: Path) -> list[tuple[int, ...]]:
    """The tokens of the blocks in a folder."""
    held = CacheFolder(folder)
    headers = [held.header(*entry.name) for entry in held.entries()]
    return sorted(header.token_ids for header in headers if header is not None)


def blocks_of(token_ids: list[int], begin: int, end: int) -> list[tuple[int, ...]]:
    """The tokens of the blocks from number ``begin`` to ``end``."""
    places = range(begin * BLOCK_SIZE, end * BLOCK_SIZE, BLOCK_SIZE)
    return sorted(tuple(token_ids[place : place + BLOCK_SIZE]) for place in places)


def test_an_imported_prompt_cache_of_other_weights_never_reaches_the_folder(
    models: tuple[Any, Any], tmp_path: Path
):
    model, stock = models
    prompts = [prompt(40, seed) for seed in range(4)]
    files = [
        prompt_cache_of(tmp_path / f"{number}.safetensors", stock, token_ids)
        for number, token_ids in enumerate(prompts)
    ]
    more = [[*token_ids, *prompt(5, 9)] for token_ids in prompts]
    with tiered(model, tmp_path / "kv", **OPTIONS) as engine:
        for file, token_ids in zip(files, prompts, strict=True):
            engine.import_prompt_cache(file, token_ids)
        taken = [answer(engine, token_ids, greedy(20)) for token_ids in more]
        assert [output.num_cached_tokens for output in taken] == [40] * 4
    alone = [ask_alone(model, token_ids, greedy(20)) for token_ids in more]
    assert [output.outputs[0].token_ids for output in taken] != alone, "they are of other weights"
    assert block_files(tmp_path / "kv") == []
    with tiered(model, tmp_path / "kv", **OPTIONS) as engine:
        later = [answer(engine, token_ids, greedy(20)) for token_ids in more]
        assert tier_stats(engine).num_dropped_blocks == 0
    assert [output.outputs[0].token_ids for output in later] == alone
    assert len(block_files(tmp_path / "kv")) == 4 * (64 // BLOCK_SIZE)


# Snapshots


def stored_after(path: Path, model: Any, folder: Path, token_ids: list[int]) -> int:
    """How many blocks a folder holds after an engine has loaded a snapshot and was asked."""
    with tiered(model, folder, **OPTIONS) as engine:
        num_tokens = len(engine.load_snapshot(path))
        more = [*token_ids, *prompt(3, 9)]
        assert answer(engine, more, greedy(1)).num_cached_tokens == num_tokens > 0
    return len(block_files(folder))


def test_a_snapshot_of_this_engine_counts_as_computed_here(models: tuple[Any, Any], tmp_path: Path):
    model, token_ids = models[0], prompt(40)
    path = snapshot_of(tmp_path / "a", model, token_ids)
    assert stored_after(path, model, tmp_path / "kv", token_ids) == 5
    assert tokens_of(tmp_path / "kv") == blocks_of(token_ids, 0, 5)


@pytest.mark.parametrize(
    "metadata",
    [
        pytest.param({"version": "1", "computed_by": None}, id="of version 1"),
        pytest.param({"version": "1"}, id="of version 1 that states an origin"),
        pytest.param({"computed_by": None}, id="without an origin"),
        pytest.param({"computed_by": "mlx_paged 3, mlx 0.1, reference backend on a cpu"},
                     id="of another MLX"),
    ],
)  # fmt: skip
def test_a_snapshot_of_another_origin_is_used_and_stays_out_of_the_folder(
    metadata: dict[str, str | None], models: tuple[Any, Any], tmp_path: Path
):
    model, token_ids = models[0], prompt(40)
    path = rewritten(snapshot_of(tmp_path / "a", model, token_ids), unchanged, **metadata)
    assert stored_after(path, model, tmp_path / "kv", token_ids) == 0


def test_a_snapshot_of_another_mlx_or_another_backend_stays_out_of_the_folder(
    models: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model, token_ids = models[0], prompt(40)
    with monkeypatch.context() as earlier:
        earlier.setattr(identity, "version", lambda name: "0.1")
        snapshot_of(tmp_path / "earlier", model, token_ids)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(ReferenceBackend, "name", "metal")
        snapshot_of(tmp_path / "elsewhere", model, token_ids)
    for name in ("earlier", "elsewhere"):
        assert stored_after(tmp_path / name, model, tmp_path / "kv", token_ids) == 0


def test_a_snapshot_whose_arrays_were_altered_is_refused(models: tuple[Any, Any], tmp_path: Path):
    model, token_ids = models[0], prompt(40)
    path, name = snapshot_of(tmp_path / "a", model, token_ids), "layers.2.values.rows"
    again = tmp_path / "b"
    # By programs that keep the metadata, its checksum included: of safetensors, and in place.
    with safe_open(path, "numpy") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        save_file({**arrays, name: arrays[name] * np.float32(1.3)}, again, file.metadata())
    content = bytearray(path.read_bytes())
    content[-arrays[name].nbytes :] = (arrays[name] * np.float32(1.3)).tobytes()
    path.write_bytes(content)
    for altered in (path, again):
        with pytest.raises(SnapshotError, match=r"was altered|it has no checksum"):
            make_engine(model, **OPTIONS).load_snapshot(altered)


def test_saving_foreign_kv_does_not_make_them_ours(models: tuple[Any, Any], tmp_path: Path):
    model, stock = models
    token_ids = prompt(40)
    engine = make_engine(model, **OPTIONS)
    engine.import_prompt_cache(prompt_cache_of(tmp_path / "a.safetensors", stock, token_ids),
                               token_ids)  # fmt: skip
    more = [*token_ids, *prompt(20, 9)]
    answer(engine, more, greedy(1))
    # The imported blocks alone, and with those that were computed after them.
    for name, saved in (("imported", token_ids), ("computed", more)):
        engine.save_snapshot(tmp_path / name, saved)
        assert stored_after(tmp_path / name, model, tmp_path / f"kv of {name}", saved) == 0


def test_a_snapshot_of_sequences_states_no_origin(models: tuple[Any, Any], tmp_path: Path):
    model, token_ids = models[0], prompt(40)
    sequences = Sequences(make_kv_cache(model, kv_cache_bytes="20blocks", **OPTIONS))
    # Their rows, tokens and model are what the program says.
    run_step(model, sequences, {"a": [*reversed(token_ids)]})
    save_snapshot(tmp_path / "a", model, sequences, "a", token_ids)
    assert stored_after(tmp_path / "a", model, tmp_path / "kv", token_ids) == 0


# Requests


def test_what_was_computed_before_foreign_blocks_is_still_stored(
    models: tuple[Any, Any], tmp_path: Path
):
    model, stock = models
    token_ids = prompt(40)
    path = prompt_cache_of(tmp_path / "a.safetensors", stock, token_ids)
    with tiered(model, tmp_path / "kv", **OPTIONS) as engine:
        answer(engine, token_ids[:17], greedy(1))
        engine.import_prompt_cache(path, token_ids)
        answer(engine, [*token_ids, *prompt(20, 9)], greedy(1))
        # Of other tokens from the third block on: those before it were computed here.
        answer(engine, [*token_ids[:16], *prompt(20, 8)], greedy(1))
    expected = blocks_of(token_ids, 0, 2) + blocks_of([*token_ids[:16], *prompt(20, 8)], 2, 4)
    assert tokens_of(tmp_path / "kv") == sorted(expected)


def test_a_request_that_runs_while_foreign_kv_of_its_tokens_come_in_is_stored(
    models: tuple[Any, Any], tmp_path: Path
):
    model, stock = models
    token_ids = prompt(60)
    path = prompt_cache_of(tmp_path / "a.safetensors", stock, token_ids)
    options = {"max_num_batched_tokens": 20, "max_num_seqs": 4, **OPTIONS}
    with tiered(model, tmp_path / "kv", **options) as engine:
        engine.add_request("a", token_ids, greedy(2))
        engine.step()
        engine.import_prompt_cache(path, token_ids)
        run(engine)
        # The index finds the foreign blocks first, as for any other request.
        assert answer(engine, [*token_ids, 5], greedy(1)).num_cached_tokens == 56
    assert tokens_of(tmp_path / "kv") == blocks_of(token_ids, 0, 7)
    kv = kv_of(tmp_path / "kv")
    assert_equal_kv(kv, kv_of_tokens(model, [token_ids], tmp_path / "clean"))


@pytest.mark.parametrize("swap_bytes", ["0", "100blocks"])
def test_a_preempted_request_remains_what_it_was(
    swap_bytes: str, models: tuple[Any, Any], tmp_path: Path
):
    model, stock = models
    foreign, own = prompt(40), [prompt(40, seed) for seed in (1, 2)]
    alone = ask_alone(model, [*foreign, 3], greedy(30))
    path = prompt_cache_of(tmp_path / "a.safetensors", stock, foreign)
    options = {"kv_cache_bytes": "17blocks", "swap_bytes": swap_bytes, **OPTIONS}
    with tiered(model, tmp_path / "kv", **options) as engine:
        engine.import_prompt_cache(path, foreign)
        requests = {"foreign": [*foreign, 3], "a": own[0], "b": own[1]}
        for name, token_ids in requests.items():
            engine.add_request(name, token_ids, greedy(30), priority=int(name == "foreign"))
            engine.step()

        def forget(engine: Engine = engine) -> None:
            # What it has begun with is gone when it goes on.
            if engine.scheduler.num_preemptions and engine.scheduler.waiting:
                engine.manager.evict_blocks(range(1, engine.cache.pool.num_blocks))

        outputs = run(engine, forget)
        assert outputs["foreign"].num_cached_tokens == 40
        assert outputs["foreign"].outputs[0].token_ids != alone
        assert engine.scheduler.num_preemptions > 0
    asked = [[*requests[name], *output.outputs[0].token_ids] for name, output in outputs.items()]
    assert_equal_kv(kv_of(tmp_path / "kv"), kv_of_tokens(model, asked, tmp_path / "clean"))


def test_a_tier_of_the_callers_gets_nothing_foreign(models: tuple[Any, Any], tmp_path: Path):
    model, stock = models
    token_ids, shelf = prompt(40), HostMemory()
    path = prompt_cache_of(tmp_path / "a.safetensors", stock, token_ids)
    engine = make_engine(model, tier=lambda fingerprint: shelf, **OPTIONS)
    engine.import_prompt_cache(path, token_ids)
    answer(engine, [*token_ids, *prompt(20, 9)], greedy(12, n=2))
    answer(engine, prompt(16, 5), greedy(1))
    assert engine.close(60)
    assert shelf._blocks.keys() == set(hash_token_blocks(prompt(16, 5), BLOCK_SIZE))


# States


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2"])
def test_states_of_a_file_never_reach_the_folder(name: str, tmp_path: Path):
    model, token_ids = adapted_model(name), prompt(70)
    path = snapshot_of(tmp_path / "a", model, token_ids)
    rewritten(path, scale, version="1", computed_by=None)
    more = [*token_ids[:64], *prompt(30, 9)]
    with tiered(model, tmp_path / "kv", **OPTIONS) as engine:
        assert len(engine.load_snapshot(path)) == 64
        for seed in range(3):  # Shared, and so worth a file.
            output = answer(engine, [*token_ids[:64], *prompt(30, seed)], greedy(12))
            assert output.num_cached_tokens == 64
    assert block_files(tmp_path / "kv") == []
    with tiered(model, tmp_path / "kv", **OPTIONS) as engine:
        output = answer(engine, more, greedy(12))
        assert output.num_cached_tokens == 0
    assert output.outputs[0].token_ids == greedy_answer(name, more, 12)
    assert block_files(tmp_path / "kv") != []


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2"])
def test_states_of_this_engine_go_from_a_file_to_the_folder(name: str, tmp_path: Path):
    model, token_ids = adapted_model(name), prompt(70)
    path = snapshot_of(tmp_path / "a", model, token_ids)
    with tiered(model, tmp_path / "kv", **OPTIONS) as engine:
        engine.load_snapshot(path)
        assert answer(engine, token_ids, greedy(12)).num_cached_tokens == 64
    with tiered(model, tmp_path / "kv", **OPTIONS) as engine:
        output = answer(engine, token_ids, greedy(12))
        assert output.num_cached_tokens == 64 and tier_stats(engine).num_read_states == 1
    assert output.outputs[0].token_ids == greedy_answer(name, token_ids, 12)


def test_a_foreign_state_is_not_written_when_it_is_evicted_from_memory(tmp_path: Path):
    model, token_ids = adapted_model("qwen3_next"), prompt(70)
    path = snapshot_of(tmp_path / "a", model, token_ids)
    rewritten(path, scale, version="1", computed_by=None)
    with tiered(model, tmp_path / "kv", **OPTIONS) as engine:
        # The state after 64 tokens is worth a file when it is evicted, and not before.
        engine.disk_tier._unsaved._num_tokens_per_state = 100
        answer(engine, token_ids, greedy(1))
        assert engine.reset_prefix_cache()
        engine.load_snapshot(path)
        checkpoints = engine.manager.states.checkpoints
        assert [checkpoints.get(each).is_foreign for each in checkpoints._kept] == [True]
        checkpoints.on_eviction(checkpoints.get(next(iter(checkpoints._kept))))
        flush(engine)
        assert tier_stats(engine).num_saved_states == 0
    kv = kv_of(tmp_path / "kv")
    assert not [key for key in kv if group_of(key) == STATES]


# Everything at random


@mostly_slow(
    ("kind", "seed"),
    [("full", 0), ("qwen3_next", 0), ("full", 1), ("windows", 2), ("mamba2", 1)],
    quick=(0, 1),
)
def test_a_folder_holds_what_an_engine_without_files_computes(
    kind: str, seed: int, models: tuple[Any, Any], tmp_path: Path
):
    stock, options = None, dict(OPTIONS)
    if kind == "full":
        model, stock = models
    elif kind == "windows":
        model, more = lively_model_and_options("layers")
        options |= more
    else:
        model = adapted_model(kind)
    play = Play(model, stock, tmp_path, seed, **options)
    play.run(num_engines=3, num_events=60)
    assert play.num_loads > play.num_foreign_loads > 10
    found = kv_of(tmp_path / "kv")
    states = {key for key in found if group_of(key) == STATES}
    expected = kv_of_tokens(model, play.asked, tmp_path / "clean", **options)
    if kind in RECURRENT:
        assert states
        expected |= states_of_tokens(model, play.asked, states)
    if kind != "mamba2":
        assert found.keys() > states
    assert_equal_kv(found, expected)
