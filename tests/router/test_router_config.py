"""The flags and the file that several models are configured with."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mlx_paged.errors import ArgumentError
from mlx_paged.router import program
from mlx_paged.server.settings import read_api_keys


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list:
    """What would be served: the flags of one model, or those of several ones by name."""
    found: list = []
    monkeypatch.setattr(program.server, "run", lambda args: found.append(args) or 0)
    monkeypatch.setattr(program, "_serve", lambda args, models: found.append((args, models)) or 0)
    return found


def write(folder: Path, text: str) -> str:
    file = folder / "models.toml"
    file.write_text(text)
    return str(file)


def test_one_model_is_served_without_a_router(served):
    assert program.main(["owner/name", "--port", "1"]) == 0
    assert program.main(["--model", "owner/name"]) == 0
    assert program.main([]) == 0
    assert [args.model for args in served] == ["owner/name", "owner/name", None]
    assert served[0].port == 1


def test_several_models_have_their_flags_from_the_line_the_file_and_their_sections(
    served, tmp_path: Path
):
    file = write(
        tmp_path,
        """
        model = "a/first"
        port = 7000
        kv-cache-bytes = "1G"
        no_thinking = true
        run-ahead = false
        cors-origin = ["http://x", "http://y"]
        chat-template-args = { a = 1 }

        [models.second]
        model = "~/models/second"
        aliases = ["other", "s"]
        kv_cache_bytes = "2G"
        keep_alive = 60
        pin = true
        """,
    )
    assert program.main(["b/third", "--config", file, "--port", "7001", "--seed", "3"]) == 0
    [(args, models)] = served
    assert (args.port, args.cors_origins) == (7001, ["http://x", "http://y"])
    assert list(models) == ["a/first", "b/third", "second"]
    names = ("model", "served_model_name", "kv_cache_bytes", "keep_alive", "pin", "seed")
    assert [[flags[name] for name in names] for flags in models.values()] == [
        ["a/first", ["a/first"], "1G", None, False, 3],
        ["b/third", ["b/third"], "1G", None, False, 3],
        ["~/models/second", ["second", "other", "s"], "2G", "60", True, 3],
    ]
    for flags in models.values():
        assert flags["no_thinking"] is True and flags["run_ahead"] is False
        assert flags["chat_template_args"] == {"a": 1}
        assert (flags["api_key"], flags["api_key_file"], flags["name"]) == ([], None, None)


def test_the_models_of_a_folder_are_found_also_below_publishers(served, tmp_path: Path):
    for name in ("a", "publisher/b", "no/deeper/c"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").touch()
    (tmp_path / "publisher" / "d.gguf").touch()
    assert program.main(["--models-dir", str(tmp_path)]) == 0
    [(_, models)] = served
    assert list(models) == ["a", "publisher/b", "publisher/d.gguf"]
    assert models["publisher/b"]["model"] == str(tmp_path / "publisher/b")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = [", "is not valid TOML"),
        ("[models]\nx = 1", "has models that are not sections; write [models.NAME]"),
        ("nonsense = 1\n[models.x]", "models.toml: error: unrecognized arguments: --nonsense=1"),
        ("[models.x]\nport = 1", "[models.x]: error: port is for all models; write it at the top"),
        ("[models.x]\nkv-bits = 3", "[models.x]: error: argument --kv-bits: "),
        ("[models.x]\naliases = ['y']\n[models.y]", "two have the name 'y'"),
        ("served-model-name = 'z'\n[models.x]", "--served-model-name is for one model"),
    ],
)
def test_mistakes_in_the_file_are_one_line_that_says_where(
    served, tmp_path: Path, capsys: pytest.CaptureFixture, text: str, said: str
):
    assert program.main(["--config", write(tmp_path, text)], "serve") == 2
    [line] = capsys.readouterr().err.splitlines()
    assert said in line and served == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--config", "/no/file"], "--config '/no/file' can't be read: No such file"),
        (["--models-dir", "/no/folder"], "--models-dir '/no/folder' has no model"),
        (["--model", "a/b", "--model", "c/a/../a/b", "a/b"], "two have the name 'a/b'"),
        (["--model", "a", "--keep-alive", "5m"], "--keep-alive is for several models, or for one"),
        (["--model", "a", "b", "--served-model-name", "x"], "--served-model-name is for one model"),
    ],
)
def test_mistakes_in_flags_are_one_line(served, capsys, words: list[str], said: str):
    assert program.main(words, "serve") == 2
    [line] = capsys.readouterr().err.splitlines()
    assert said in line and served == []


def test_several_ranks_are_refused_by_name(served, capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MLX_RANK", "0")
    assert program.main(["--model", "a", "--model", "b"]) == 2
    assert "several models can't be served by several ranks" in capsys.readouterr().err


def test_keys_have_rights(tmp_path: Path):
    file = tmp_path / "keys"
    file.write_text("alice a models=one,uno\nroot r admin\nboth b admin models=two\n")
    file.chmod(0o600)
    keys = read_api_keys(["plain"], str(file), ["one", "uno", "two"])
    assert [(key.name, key.models, key.is_admin) for key in keys] == [
        ("key#1", None, False),
        ("alice", {"one", "uno"}, False),
        ("root", None, True),
        ("both", {"two"}, True),
    ]


@pytest.mark.parametrize(
    ("text", "models", "said"),
    [
        (
            "alice sesame models=three",
            ["one", "two"],
            "is bound to 'three'; this server has 'one', 'two'",
        ),
        ("alice sesame models=one", [], "is bound to models, of which this server has only one"),
        ("alice sesame b", ["one"], "must be 1 to 512 ASCII characters without spaces"),
        ("alice sesame admin admin", ["one"], "has the same right twice"),
    ],
)
def test_rights_that_are_wrong_are_refused(text: str, models: list[str], said: str):
    with pytest.raises(ArgumentError, match=said.replace("'", ".")) as raised:
        read_api_keys([text], models=models)
    assert "sesame" not in str(raised.value)


def test_the_router_imports_no_code_of_models():
    probe = (
        "import sys; from mlx_paged.router import app, program, residency\n"
        "print({'mlx_lm', 'transformers', 'mlx_paged.engine.engine'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr
