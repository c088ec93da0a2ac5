"""The folder in which several models keep their conversations, if no flag names one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlx_paged.cli.flags import engine_options
from mlx_paged.errors import ArgumentError
from mlx_paged.router.model_process import ModelProcess
from mlx_paged.router.program import read_models, setup_arg_parser, with_cache_dir
from mlx_paged.server.program import max_adapters_of


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    return tmp_path / "caches"


def models_of(*words: str, **sections: dict[str, Any]) -> Any:
    args = setup_arg_parser("serve").parse_args(list(words))
    return with_cache_dir(read_models("serve", args, ["one", "two"], sections))


def test_all_models_share_one_private_folder_and_its_limits(caches: Path, capsys):
    models = models_of("--cache-dir-size", "5G", "--cache-dir-writes", "50G/day")
    folder = caches / "mlx-paged"
    for flags in models.values():
        assert flags["cache_dir"] == str(folder)
        assert flags["cache_dir_size"] == 5 * 2**30
        assert flags["cache_dir_writes"] == 50 * 2**30
    assert [each.stat().st_mode & 0o777 for each in (folder, folder / "blocks")] == [0o700] * 2
    assert capsys.readouterr().err == (
        f"[conversations are kept in {folder}, 5.4 GB at most for all models, as private as their "
        "texts; --cache-dir none keeps them in memory only]\n"
    )


def test_none_refuses_it_for_all_or_for_one(caches: Path, capsys):
    models = models_of("--cache-dir", "none")
    assert not caches.exists() and capsys.readouterr().err == ""
    args = setup_arg_parser("serve").parse_args(["--cache-dir", models["one"]["cache_dir"]])
    assert engine_options(args, "server")["cache_dir"] is None
    models = models_of(one={"cache-dir": "none"}, two={"kv": "basic"}, three={})
    found = [flags["cache_dir"] for flags in models.values()]
    assert found == ["none", None, str(caches / "mlx-paged")]


def test_a_folder_that_can_not_be_used_is_said_and_stops_nothing(caches: Path, capsys):
    (caches / "mlx-paged").mkdir(parents=True)
    (caches / "mlx-paged" / "letter.txt").write_text("private")
    assert [flags["cache_dir"] for flags in models_of().values()] == [None, None]
    said = capsys.readouterr().err
    assert said.startswith("[conversations are kept in memory only: ") and "letter.txt" in said


def test_adapters_of_a_section_are_names_of_its_model(tmp_path: Path):
    sections = {"one": {"adapter": ["sql=adapters/sql", "law=adapters/law"]}}
    flags = models_of("--cache-dir", "none", **sections)
    processes = [ModelProcess(name, each, tmp_path) for name, each in flags.items()]
    assert [each.names for each in processes] == [("one", "sql", "law"), ("two",)]
    assert [max_adapters_of(each) for each in flags.values()] == [2, 0]
    with pytest.raises(ArgumentError, match="two have the name 'sql'"):
        models_of("--cache-dir", "none", "--adapter", "sql=adapters/sql")


def test_the_limits_are_for_all_models(capsys):
    with pytest.raises(SystemExit):
        models_of(one={"cache-dir-size": "1G"})
    assert "cache-dir-size is for all models" in capsys.readouterr().err
