"""Files with K/V of all origins, engines that are given them, and what folders hold afterwards."""

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
from mlx.utils import tree_map_with_path
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache, save_prompt_cache
from paged_testing.integrity import check_scheduler

from helpers.disk_tiers import block_files, flush, tiered
from helpers.engine_runs import answer, greedy, make_engine, prompt
from mlx_paged.block_store.layout import parse_block
from mlx_paged.cache import Sequences
from mlx_paged.cache.state_bytes import state_to_bytes
from mlx_paged.core import hash_token_blocks, state_key
from mlx_paged.core.block_hash import HASH_NBYTES
from mlx_paged.core.tier import STATES
from mlx_paged.engine.engine import Engine
from mlx_paged.errors import ArgumentError, CacheFullError
from mlx_paged.models.kv_cache import make_kv_cache
from mlx_paged.models.run_step import run_step
from mlx_paged.request import RequestOutput
from mlx_paged.snapshots.rows import TensorFile, written_tensor_file

BLOCK_SIZE = 8
OPTIONS = {"block_size": BLOCK_SIZE}
Payloads = dict[bytes, bytes]


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


def rewritten(path: Path, change: Callable[[str, bytearray], None], **metadata: str | None) -> Path:
    """A snapshot whose arrays and metadata are changed, with a new checksum: what an engine of
    another time would have written. ``None`` removes a field.
    """
    file = TensorFile(path)
    fields = {**file.metadata, **metadata}
    kept = {name: value for name, value in fields.items() if value is not None}
    with written_tensor_file(path.with_suffix(".new"), kept, file.arrays) as rows:
        for name, info in file.arrays.items():
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
            engine.abort(self.rng.choice(list(engine.reports.requests)))
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
        check_scheduler(engine.scheduler)

    def _note(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            if output.finished:
                assert output.error is None
                prompt_ids = list(output.prompt_token_ids)
                self.asked += [[*prompt_ids, *each.token_ids] for each in output.outputs]
