"""K/V that came from a file never reach a folder: what a folder holds is what an engine without
files computes.
"""

from __future__ import annotations

import contextlib
import os
import random
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from helpers.adapted_models import RECURRENT, adapted_model, greedy_answer
from helpers.disk_tiers import answer, block_files, flush, tier_stats, tiered
from helpers.engine_helpers import CONFIG, livelier_model
from helpers.engine_runs import ask_alone, greedy, make_engine, prompt, run
from helpers.fast_lane import mostly_slow
from helpers.windowed_models import lively_model_and_options
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.generate import generate_step
from mlx_lm.models import qwen3 as mlx_lm_qwen3
from mlx_lm.models.cache import make_prompt_cache, save_prompt_cache
from safetensors import safe_open
from safetensors.numpy import save_file

from mlx_paged.block_store import CacheFolder
from mlx_paged.block_store.block_file import parse_block
from mlx_paged.cache import Sequences
from mlx_paged.cache.state_bytes import state_to_bytes
from mlx_paged.core import hash_token_blocks, state_key
from mlx_paged.core.block_hash import HASH_NBYTES
from mlx_paged.core.tier import STATES, HostMemory
from mlx_paged.engine import kv_fingerprint
from mlx_paged.engine.engine import Engine
from mlx_paged.errors import ArgumentError, CacheFullError
from mlx_paged.models.kv_cache import make_kv_cache
from mlx_paged.models.run_step import run_step
from mlx_paged.ops.reference import ReferenceBackend
from mlx_paged.request import RequestOutput
from mlx_paged.snapshots import SnapshotError, save_snapshot
from mlx_paged.snapshots.tensor_file import TensorFile, written_tensor_file

BLOCK_SIZE = 8
OPTIONS = {"block_size": BLOCK_SIZE}


def scaled(model: Any) -> Any:
    """The same model with ``down_proj`` scaled by 1.3: K/V of the same shapes, and others."""
    other = type(model)(model.args)
    weights = tree_map_with_path(
        lambda path, leaf: leaf * 1.3 if "down_proj" in path else leaf, model.parameters()
    )
    other.update(weights)
    mx.eval(other.parameters())
    return other


def prompt_cache_of(path: Path, stock: Any, token_ids: list[int]) -> Path:
    """A prompt cache of mlx-lm's own."""
    caches = make_prompt_cache(stock)
    list(generate_step(mx.array(token_ids), stock, max_tokens=0, prompt_cache=caches))
    save_prompt_cache(str(path), caches, {"model": "m", "tokenizer_config": "{}"})
    return path


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


def rewritten(path: Path, change: Callable[[str, bytearray], None], **metadata: str | None) -> Path:
    """A snapshot whose arrays and metadata are changed, with a new checksum: what an engine of
    another time would have written. ``None`` removes a field.
    """
    file = TensorFile(path)
    fields = {**file.metadata, **metadata}
    kept = {name: value for name, value in fields.items() if value is not None}
    with written_tensor_file(path.with_suffix(".new"), kept, file.tensors) as rows:
        for name, info in file.tensors.items():
            for head in range(info.shape[0]):
                content = bytearray(file.read(name, head, slice(0, info.shape[1])))
                change(name, content)
                rows.write(name, head, slice(0, info.shape[1]), memoryview(content))
    return path.with_suffix(".new").rename(path)


def unchanged(name: str, content: bytearray) -> None:
    pass


def scale(name: str, content: bytearray) -> None:
    """Numbers as other weights would give them."""
    begin = 0 if name != "state" else 4 + struct.unpack_from("<I", content)[0]
    numbers = np.frombuffer(memoryview(content)[begin:], np.float32)
    numbers *= np.float32(1.3)


def snapshot_of(path: Path, model: Any, token_ids: list[int], **options: Any) -> Path:
    """The snapshot of an engine that has computed these tokens."""
    engine = make_engine(model, **OPTIONS | options)
    answer(engine, token_ids, greedy(1))
    engine.save_snapshot(path, token_ids)
    return path


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
        earlier.setattr(kv_fingerprint, "version", lambda name: "0.1")
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


def test_kv_of_unknown_tokens_are_not_stored(models: tuple[Any, Any], tmp_path: Path):
    model, stock = models
    path = prompt_cache_of(tmp_path / "a.safetensors", stock, prompt(40))
    with tiered(model, tmp_path / "kv", **OPTIONS) as engine:
        pinned = engine.pin_prompt_cache(path)
        for number in range(2):
            token_ids = [*pinned.token_ids, *prompt(20, number)]
            answer(engine, token_ids, greedy(12, n=2), cache_salt=pinned.cache_salt)
        assert any(block.is_foreign for block in engine.cache.pool.blocks)
        assert all(block.is_foreign for _, block in engine.cache.pool.prefix_index), (
            "each block follows them"
        )
    assert block_files(tmp_path / "kv") == []


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
        engine.disk_tier._states._num_tokens_per_state = 100
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

Payloads = dict[bytes, bytes]


def kv_of(folder: Path) -> Payloads:
    """The contents of all blocks and states in a folder, by their keys."""
    found = {}
    for file in block_files(folder):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            digest, block_hash = file.parts[-3], bytes.fromhex(file.stem)
            size = file.stat().st_size
            found[block_hash] = parse_block(descriptor, size, digest, block_hash)[1]
        finally:
            os.close(descriptor)
    return found


def kv_of_tokens(
    model: Any, sequences: Iterable[list[int]], folder: Path, **options: Any
) -> Payloads:
    """What an engine stores of these tokens that reads no files."""
    options = OPTIONS | options | {"kv_cache_bytes": "4000blocks"}
    with tiered(model, folder, **options) as engine:
        for token_ids in sequences:
            answer(engine, token_ids, greedy(1))
            flush(engine)
            engine.reset_prefix_cache()
    return kv_of(folder)


def states_of_tokens(model: Any, sequences: Iterable[list[int]], keys: Iterable[bytes]) -> Payloads:
    """The states with these keys, computed from the tokens before them."""
    prefixes = {
        state_key(block_hash): token_ids[: (index + 1) * BLOCK_SIZE]
        for token_ids in sequences
        for index, block_hash in enumerate(hash_token_blocks(token_ids, BLOCK_SIZE))
    }
    held = Sequences(make_kv_cache(model, kv_cache_bytes="4000blocks", **OPTIONS))
    for key in keys:
        run_step(model, held, {key: prefixes[key]})
    states = held.manager.states
    return {key: state_to_bytes(states.get(key, len(prefixes[key]))) for key in keys}


def assert_equal_kv(found: Payloads, expected: Payloads) -> None:
    """All but for rounding: steps of other sizes add in another order."""
    assert found.keys() <= expected.keys()
    for key, payload in found.items():
        numbers, wanted = (np.frombuffer(each, np.uint8) for each in (payload, expected[key]))
        begin = 0
        if group_of(key) == STATES:
            begin = 4 + struct.unpack_from("<I", payload)[0]
            assert payload[:begin] == expected[key][:begin]
        numbers, wanted = (each[begin:].view(np.float32) for each in (numbers, wanted))
        np.testing.assert_allclose(numbers, wanted, rtol=1e-3, atol=1e-4)


def group_of(key: bytes) -> int:
    return int.from_bytes(key[HASH_NBYTES:], "little")


class Play:
    """One folder and several engines on it, one after the other, which are asked, and given files,
    at random.

    Attributes:
        asked: the tokens of all prompts with their answers.
    """

    def __init__(self, model: Any, stock: Any, folder: Path, seed: int, **options: Any):
        self.model, self.stock, self.folder = model, stock, folder
        self.rng = random.Random(seed)
        self.options = {"kv_cache_bytes": "40blocks", "swap_bytes": "12blocks", **options}
        stems = [prompt(rng_length, number) for number, rng_length in enumerate((64, 48, 40))]
        # Prompts share beginnings of all lengths.
        self.prompts = [
            [*self.rng.choice(stems)[: self.rng.randrange(8, 64)],
             *prompt(self.rng.randrange(1, 30), 10 + number)]
            for number in range(8)
        ]  # fmt: skip
        self.prompts += stems
        self.asked: list[list[int]] = []
        self.files = self._made_before()
        self.num_loads = self.num_foreign_loads = 0

    def _made_before(self) -> list[tuple[Path, str]]:
        """Files of each kind, and which kind."""
        files = []
        for number, token_ids in enumerate(self.prompts):
            path = self.folder / f"before {number}"
            try:
                snapshot_of(path, self.model, token_ids, **self.options)
            except ArgumentError:  # Not one block, or no state.
                continue
            if number % 2:
                files.append((rewritten(path, scale, version="1", computed_by=None), "snapshot"))
            else:
                files.append((path, "snapshot"))
            if self.stock is not None and number % 3 == 0:
                path = self.folder / f"before {number}.safetensors"
                files.append((prompt_cache_of(path, self.stock, token_ids), str(number)))
        return files

    def run(self, num_engines: int, num_events: int) -> None:
        for _ in range(num_engines):
            with tiered(self.model, self.folder / "kv", **self.options) as engine:
                for number in range(num_events):
                    self._event(engine, number)
                self._finish(engine)

    def _event(self, engine: Engine, number: int) -> None:
        kind = self.rng.random()
        if kind < 0.35:
            self._ask(engine, f"{number}")
        elif kind < 0.6:
            self._load(engine)
        elif kind < 0.7:
            self._save(engine, number)
        elif kind < 0.75:
            engine.reset_prefix_cache()
        elif kind < 0.8 and engine.has_unfinished_requests():
            engine.abort(self.rng.choice(list(engine.reports.states)))
        else:
            self._steps(engine, self.rng.randrange(1, 12))

    def _ask(self, engine: Engine, name: str) -> None:
        params = greedy(self.rng.randrange(1, 20), n=self.rng.choice([1, 1, 2]))
        token_ids = self.rng.choice(self.prompts)
        cut = self.rng.randrange(len(token_ids) // 2, len(token_ids))
        engine.add_request(
            name, token_ids[: cut + 1], params, no_store=self.rng.random() < 0.1,
            priority=self.rng.randrange(3),
        )  # fmt: skip

    def _load(self, engine: Engine) -> None:
        path, kind = self.rng.choice(self.files)
        try:
            if kind == "snapshot":
                engine.load_snapshot(path)
            elif self.rng.random() < 0.2:
                pinned = engine.pin_prompt_cache(path)
                engine.add_request(
                    f"pinned {self.rng.random()}", [*pinned.token_ids, *prompt(9, 3)],
                    greedy(5), cache_salt=pinned.cache_salt,
                )  # fmt: skip
            else:
                engine.import_prompt_cache(path, self.prompts[int(kind)])
        except CacheFullError:
            return
        self.num_loads += 1
        self.num_foreign_loads += any(block.is_foreign for block in engine.cache.pool.blocks)

    def _save(self, engine: Engine, number: int) -> None:
        path = self.folder / f"during {len(self.files)} {number}"
        token_ids = self.rng.choice([*self.asked, *self.prompts])
        with contextlib.suppress(ArgumentError):  # None of it is cached.
            engine.save_snapshot(path, token_ids)
            self.files.append((path, "snapshot"))

    def _steps(self, engine: Engine, most: int) -> None:
        for _ in range(most):
            if not engine.has_unfinished_requests():
                return
            self._note(engine.step())

    def _finish(self, engine: Engine) -> None:
        self._steps(engine, 10_000)
        engine.scheduler.check_integrity()

    def _note(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            if output.finished:
                assert output.error is None
                prompt_ids = list(output.prompt_token_ids)
                self.asked += [[*prompt_ids, *each.token_ids] for each in output.outputs]


@mostly_slow("seed", range(3))
@mostly_slow("kind", ["full", "windows", "qwen3_next", "mamba2"], quick=(0, 2))
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
