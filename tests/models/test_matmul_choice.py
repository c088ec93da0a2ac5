"""The choice of a matmul: measured once by a clock, kept in a file, never an error."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from helpers.engine_runs import CONFIG, livelier_model

from mlx_paged.engine import build
from mlx_paged.models import matmul_choice
from mlx_paged.models.matmul import (
    SEVERAL_ROWS,
    Linears,
    LinearShape,
    multiplied_by_mlx,
)
from mlx_paged.models.matmul_choice import as_entries, chosen_rows, from_entries
from mlx_paged.ops import choose
from mlx_paged.options.config import SchedulerConfig

AFFINE = (4, 32, "affine", "float32")
WIDE, DOWN = LinearShape(32, 256, *AFFINE), LinearShape(256, 32, *AFFINE)
SMALL = LinearShape(32, 32, *AFFINE)
HEAD = LinearShape(32, 61, 16, 0, "dense", "float32")


@pytest.fixture(scope="module")
def linears() -> Linears:
    model = livelier_model(CONFIG | {"intermediate_size": 256})
    nn.quantize(
        model,
        32,
        4,
        class_predicate=lambda path, _: path.startswith("model.layers") and "proj" in path,
    )
    found = Linears.of([model])
    assert {WIDE, DOWN, SMALL, HEAD} <= set(found.shapes)
    return found


class PlantedClock:
    """A clock that only the evaluation of a chain moves, by the seconds that are planted.

    Attributes:
        num_chains: that were evaluated.
    """

    def __init__(self, seconds: Callable[[str, LinearShape, int], float]):
        self.now, self.num_chains = 0.0, 0
        self._seconds, self._newest = seconds, 0.0

    def __call__(self) -> float:
        return self.now

    def noting(self, name: str, product: Callable[..., mx.array]) -> Callable[..., mx.array]:
        def call(module: nn.Module, x: mx.array, shape: LinearShape) -> mx.array:
            self._newest = self._seconds(name, shape, x.shape[0])
            return product(module, x, shape)

        return call

    def evaluate(self, *arrays: Any) -> None:
        self.num_chains += self._newest > 0
        self.now, self._newest = self.now + self._newest, 0.0


@pytest.fixture
def planted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[[Callable[[str, LinearShape, int], float]], PlantedClock]:
    """On a Metal GPU, with a cache folder of its own, products take as long as a function says."""
    monkeypatch.setattr(choose, "is_metal_available", lambda: True)
    monkeypatch.setattr(matmul_choice, "try_rows_matmul", lambda *_: True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def plant(seconds: Callable[[str, LinearShape, int], float]) -> PlantedClock:
        clock = PlantedClock(seconds)
        for name in ("mlx", "rows"):
            product = clock.noting(name, multiplied_by_mlx)  # No kernel runs here.
            monkeypatch.setattr(matmul_choice, f"multiplied_by_{name}", product)
        monkeypatch.setattr(matmul_choice.mx, "eval", clock.evaluate)
        return clock

    return plant


def as_on_an_m1(name: str, shape: LinearShape, rows: int) -> float:
    """MLX reads the weights once per row; one row is the same for both."""
    return 1e-3 * (rows if name == "mlx" and shape.mode != "dense" else 1)


def test_the_faster_one_is_chosen_by_shape_and_rows(linears: Linears, planted):
    clock = planted(as_on_an_m1)
    chosen = chosen_rows("auto", linears, clock)
    assert {shape: list(rows) for shape, rows in chosen.items()} == {
        shape: list(SEVERAL_ROWS) for shape in linears.shapes if shape.mode == "affine"
    }, "a shape that was not measured goes by the nearest one of its format"
    # Three shapes, five numbers of rows, three turns, two matmuls.
    assert clock.num_chains == 90


def test_numbers_between_those_measured_go_by_the_next_larger(linears: Linears, planted):
    def seconds(name: str, shape: LinearShape, rows: int) -> float:
        return 1e-3 * (0.96 if name == "mlx" or rows in (1, 8) else 0.9)

    (rows, *others) = chosen_rows("auto", linears, planted(seconds)).values()
    assert rows == [2, 3, 4, *range(9, 17)] and all(each == rows for each in others)


def test_the_nearest_shape_decides(linears: Linears, planted):
    def seconds(name: str, shape: LinearShape, rows: int) -> float:
        return 1e-3 * (1 + (name == ("mlx" if shape == WIDE else "rows")))

    chosen = chosen_rows("auto", linears, planted(seconds))
    assert list(chosen[WIDE]) == [1, *SEVERAL_ROWS]
    assert DOWN not in chosen and HEAD not in chosen


def test_measuring_ends_after_half_a_second(linears: Linears, planted):
    clock = planted(lambda name, shape, rows: 0.041 if name == "mlx" else 0.02)
    chosen = chosen_rows("auto", linears, clock)
    assert clock.now == pytest.approx(0.509)
    # With 4 rows rows_matmul was measured for the first shape only, which others go by.
    assert {tuple(rows) for rows in chosen.values()} == {(1, 2), (1, 2, 3, 4)}


def test_a_choice_is_kept_and_not_measured_again(linears: Linears, planted, tmp_path: Path):
    first = chosen_rows("auto", linears, planted(as_on_an_m1))
    (path,) = (tmp_path / "mlx_paged").iterdir()
    assert path.name.startswith("matmul-") and path.suffix == ".json"
    clock = planted(lambda *_: 1.0)
    assert chosen_rows("auto", linears, clock) == first and clock.num_chains == 0


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[[1]]", b"{}", b"[[32, 256, 4, 32, 5, 6, 7]]", b"\xff", b"[" * 10_000]
)
def test_a_damaged_file_is_measured_again(
    linears: Linears, planted, tmp_path: Path, content: bytes
):
    first = chosen_rows("auto", linears, planted(as_on_an_m1))
    (path,) = (tmp_path / "mlx_paged").iterdir()
    whole = path.read_bytes()
    path.write_bytes(content)
    clock = planted(as_on_an_m1)
    assert chosen_rows("auto", linears, clock) == first and clock.num_chains == 90
    assert path.read_bytes() == whole


def test_a_folder_that_can_t_be_used_is_no_error(
    linears: Linears, planted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    first = chosen_rows("auto", linears, planted(as_on_an_m1))
    (tmp_path / "file").write_text("")
    (tmp_path / "pipe/mlx_paged").mkdir(parents=True)
    os.mkfifo(tmp_path / "pipe/mlx_paged" / matmul_choice._file_name())
    for name in ("file", "pipe"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
        clock = planted(as_on_an_m1)
        assert chosen_rows("auto", linears, clock) == first and clock.num_chains == 90
    monkeypatch.setenv("XDG_CACHE_HOME", "")

    def no_home() -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr(Path, "home", no_home)
    assert chosen_rows("auto", linears, planted(as_on_an_m1)) == first


def test_nothing_is_measured_for_mlx_and_rows_and_on_a_cpu(
    linears: Linears, planted, monkeypatch: pytest.MonkeyPatch
):
    clock = planted(as_on_an_m1)
    assert chosen_rows("mlx", linears, clock) == {}
    everything = dict.fromkeys(linears.shapes, SEVERAL_ROWS)
    assert chosen_rows("rows", linears, clock) == everything
    monkeypatch.setattr(choose, "is_metal_available", lambda: False)
    assert chosen_rows("auto", linears, clock) == {}
    assert chosen_rows("rows", linears, clock) == everything
    assert clock.num_chains == 0


def test_a_choice_survives_json():
    chosen = {WIDE: (2, 4), HEAD: ()}
    assert from_entries(json.loads(json.dumps(as_entries(chosen)))) == chosen


def test_all_ranks_multiply_as_rank_0_has_chosen(planted):
    model = livelier_model(CONFIG)
    clock = planted(as_on_an_m1)
    entries = [[*HEAD, 2, 4]]
    # What rank 1 of two sees.
    ranks: Any = SimpleNamespace(size=2, is_leader=False, all_gather=lambda own: [entries, own])
    found = build._matmul_of([model], "auto", SchedulerConfig(), ranks)
    assert found.num_rows[HEAD] == {2, 4} and found.is_used
    assert sum(map(len, found.num_rows.values())) == 2 and clock.num_chains == 0


def test_a_format_whose_kernel_fails_stays_with_mlx(
    linears: Linears, planted, monkeypatch: pytest.MonkeyPatch
):
    def works(dtype: str, bits: int, group_size: int, mode: str) -> bool:
        return mode == "dense"

    monkeypatch.setattr(matmul_choice, "try_rows_matmul", works)
    assert list(chosen_rows("rows", linears)) == [HEAD]
    clock = planted(lambda name, shape, rows: 1e-3 if name == "rows" else 2e-3)
    assert list(chosen_rows("auto", linears, clock)) == [HEAD]
    assert clock.num_chains == 30, "of one shape"
