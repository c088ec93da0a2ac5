"""The folder, the limit and the duration of a tier on disk are read at the engine's door, and
engines that can't have such a tier are refused by name.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.engine_runs import make_engine

from mlx_paged import LLM, AsyncEngine, batch_generate, generate
from mlx_paged.engine.options import DiskTierOptions, check_engine
from mlx_paged.errors import ArgumentError
from mlx_paged.models import qwen3
from mlx_paged.options.config import DEFAULT_CACHE_DIR_SIZE, DURATION, NBYTES, SchedulerConfig


def test_a_folder_alone_has_a_limit_of_20_gib_and_no_duration(tmp_path: Path):
    assert DEFAULT_CACHE_DIR_SIZE == "20G"
    assert DiskTierOptions.read(tmp_path) == DiskTierOptions(tmp_path, 20 * 2**30, None)
    assert DiskTierOptions.read(str(tmp_path), "1.5M", "7d") == DiskTierOptions(
        tmp_path, 3 * 2**19, 7 * 86_400
    )
    assert DiskTierOptions.read(tmp_path, None, None, "50G/day") == DiskTierOptions(
        tmp_path, 20 * 2**30, None, 50 * 2**30
    )
    for given in ("50g / Day", 50 * 2**30):
        assert DiskTierOptions.read("kv", cache_dir_writes=given).max_nbytes_a_day == 50 * 2**30
    assert DiskTierOptions.read(None) is None


def test_a_folder_is_absolute_and_may_begin_with_the_users_home(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for given in ("~/kv", "kv", "./a/../kv", Path("~/kv")):
        options = DiskTierOptions.read(given)
        assert options is not None and options.folder == tmp_path / "kv"
    assert not (tmp_path / "kv").exists(), "reading options makes no folder"


@pytest.mark.parametrize(
    ("arguments", "message", "argument"),
    [
        (("",), "cache_dir must be a folder, got ''", "cache_dir"),
        (("  ",), "cache_dir must be a folder, got ' '", "cache_dir"),
        ((7,), "cache_dir must be a folder, got 7", "cache_dir"),
        ((True,), "cache_dir must be a folder, got True", "cache_dir"),
        ((b"kv",), "cache_dir must be a folder, got b'kv'", "cache_dir"),
        (("a\0b",), r"cache_dir must be a folder, got 'a\\x00b'", "cache_dir"),
        (("~nobody-here/kv",), "cache_dir '~nobody-here/kv' is in the home of a", "cache_dir"),
        ((None, "20G"), "cache_dir_size '20G' is of no use without cache_dir", "cache_dir_size"),
        ((None, None, "7d"), "cache_dir_ttl '7d' is of no use without cache_dir", "cache_dir_ttl"),
        (
            (None, None, None, "1G/day"),
            "cache_dir_writes '1G/day' is of no use without cache_dir",
            "cache_dir_writes",
        ),
        *(
            (
                ("kv", None, None, value),
                r"cache_dir_writes must be bytes per day \(50G/day, 512M/day\), .*, got ",
                "cache_dir_writes",
            )
            for value in ("50G", "50G/week", "/day", "0/day", "much/day", True, 1.5, -1)
        ),
        (("kv", "0"), "cache_dir_size must be bytes .*, got '0'", "cache_dir_size"),
        (("kv", -5), "cache_dir_size must be bytes .*, got -5", "cache_dir_size"),
        (("kv", "much"), "cache_dir_size must be bytes .*, got 'much'", "cache_dir_size"),
        (("kv", True), "cache_dir_size must be bytes .*, got True", "cache_dir_size"),
        (("kv", 1e9), "cache_dir_size must be bytes .*, got 1000000000.0", "cache_dir_size"),
        (("kv", "256blocks"), "cache_dir_size must be bytes .*, got '256blocks'", "cache_dir_size"),
        (("kv", "9" * 400), "cache_dir_size must be bytes", "cache_dir_size"),
        (("kv", None, "0"), "cache_dir_ttl must be seconds .*, above 0, got '0'", "cache_dir_ttl"),
        (("kv", None, -1), "cache_dir_ttl must be seconds .*, got -1", "cache_dir_ttl"),
        (("kv", None, "soon"), "cache_dir_ttl must be seconds .*, got 'soon'", "cache_dir_ttl"),
        (("kv", None, "7 years"), "cache_dir_ttl must be seconds", "cache_dir_ttl"),
        (("kv", None, float("nan")), "cache_dir_ttl must be seconds .*, got nan", "cache_dir_ttl"),
        (("kv", None, float("inf")), "cache_dir_ttl must be seconds .*, got inf", "cache_dir_ttl"),
        (("kv", None, True), "cache_dir_ttl must be seconds .*, got True", "cache_dir_ttl"),
        (("kv", None, "99999w"), "cache_dir_ttl must be seconds", "cache_dir_ttl"),
        (("kv", None, ["7d"]), "cache_dir_ttl must be seconds .*, got .'7d'.", "cache_dir_ttl"),
    ],
    ids=str,
)
def test_what_is_no_folder_limit_or_duration_is_refused_by_name(
    arguments: tuple[Any, ...], message: str, argument: str
):
    with pytest.raises(ArgumentError, match=message) as refusal:
        DiskTierOptions.read(*arguments)
    assert refusal.value.argument == argument
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 300


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ("90", 90), ("90s", 90), ("1.5m", 90), ("12h", 43_200), ("7d", 604_800), ("2W", 1_209_600),
        (" 3 d ", 259_200), (90, 90), (0.5, 0.5), (np.float64(2.5), 2.5), (np.int64(3), 3),
    ],
    ids=str,
)  # fmt: skip
def test_a_duration_is_a_number_with_a_unit_or_seconds(given: Any, seconds: float):
    assert DURATION.check("engine", "ttl", given) == seconds


def test_a_number_of_bytes_is_written_as_in_a_budget():
    sizes = ("100", "1K", "1.5GiB", 7, np.int64(9))
    assert [NBYTES.check("engine", "size", text) for text in sizes] == [
        100, 1024, 3 * 2**29, 7, 9,
    ]  # fmt: skip


def test_an_engine_that_has_no_blocks_to_find_again_is_refused():
    tier, config = DiskTierOptions(Path("/kv"), 2**20), SchedulerConfig()
    check = partial(check_engine, "cache_dir")
    check("paged", config, 1)
    tier.check_holds("block", 2**20)
    refused = [
        (lambda: check("basic", config, 1), "needs blocks, which kv='basic' does not"),
        (
            lambda: check("paged", SchedulerConfig(enable_prefix_caching=False), 1),
            "needs the prefix cache, and enable_prefix_caching is False",
        ),
        (lambda: check("paged", config, 2), "can't be combined with 2 ranks"),
        (
            lambda: tier.check_holds("recurrent state", 2**20 + 1),
            "cache_dir_size of 1048576 bytes is too small: a recurrent state takes 1048577",
        ),
    ]
    for refuse, message in refused:
        with pytest.raises(ArgumentError, match=message) as refusal:
            refuse()
        assert refusal.value.argument in ("cache_dir", "cache_dir_size")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"cache_dir_size": "1G"}, "cache_dir_size '1G' is of no use without cache_dir"),
    ({"cache_dir_ttl": "7d"}, "cache_dir_ttl '7d' is of no use without cache_dir"),
    ({"cache_dir": 7}, "cache_dir must be a folder, got 7"),
    ({"cache_dir": "kv", "cache_dir_size": "few"}, "cache_dir_size must be bytes"),
    ({"cache_dir": "kv", "cache_dir_size": 100}, "cache_dir_size of 100 bytes is too small: a bl"),
    ({"cache_dir": "kv", "cache_dir_ttl": 0}, "cache_dir_ttl must be seconds"),
    ({"cache_dir": "kv", "kv": "basic"}, "cache_dir needs blocks, which kv='basic' does not have"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=str)
@pytest.mark.parametrize("make", [make_engine, LLM, AsyncEngine], ids=lambda make: make.__name__)
def test_every_engine_checks_its_tier_before_it_makes_anything(
    model: qwen3.Model,
    make: Any,
    options: dict[str, Any],
    message: str,
    tmp_path: Path,
    monkeypatch,
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentError, match=message):
        make(model, **{"kv_cache_bytes": "10blocks", **options})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=str)
def test_functions_with_an_engine_of_their_own_check_its_tier(
    demo: tuple[Any, Any], options: dict[str, Any], message: str, tmp_path: Path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for function, prompts in ((generate, "a"), (batch_generate, ["a"])):
        with pytest.raises(ArgumentError, match=message):
            function(*demo, prompts, kv_cache_bytes="100blocks", **options)
    assert os.listdir(tmp_path) == []


def test_an_engine_without_its_prefix_cache_has_no_tier(model: qwen3.Model, tmp_path: Path):
    with pytest.raises(ArgumentError, match="cache_dir needs the prefix cache"):
        make_engine(model, cache_dir=tmp_path, enable_prefix_caching=False)
