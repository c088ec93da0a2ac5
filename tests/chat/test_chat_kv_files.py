"""K/V beside a saved conversation, and before one: a chat that begins again reads them."""

from __future__ import annotations

import errno
import importlib
import itertools
import json
import os
import re
import shutil
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.terminal import reused, saved_messages
from mlx_lm import cache_prompt
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

from mlx_paged import Engine, demo_model_path, load
from mlx_paged.cli.chat.commands import load_messages

QUESTIONS = ["My name is Tom. The code of apple is 4821.", "What is my name?"]
# More than a block behind what was saved.
LAST = "What is the code of apple?"
KV = ".safetensors"


@pytest.fixture
def talk(talk):
    """The chat with these lines typed, a budget, and short answers."""

    def run(*lines: str, argv: tuple[str, ...] = ()) -> tuple[int, list[str], str]:
        return talk(*lines, argv=("--kv-cache-bytes", "200blocks", "--max-tokens", "40", *argv))

    return run


# Beside a saved conversation


def test_a_loaded_conversation_goes_on_with_its_kv(talk, tmp_path: Path):
    file = tmp_path / "talk.json"
    _, through, err = talk(*QUESTIONS, LAST)
    in_memory = reused(err)[-1]
    _, _, err = talk(*QUESTIONS, f"/save {file}")
    said = re.search(
        rf"\[saved to {file}: messages: 4; K/V of (\d+) tokens in talk\.json{KV}, \d\.\d MB\]", err
    )
    num_tokens = int(said[1])
    assert sorted(os.listdir(tmp_path)) == ["talk.json", f"talk.json{KV}"]
    _, out, err = talk(f"/load {file}", LAST)
    assert f"[loaded from {file}: messages: 4; K/V of {num_tokens} tokens]" in err
    assert out == through[-1:] and reused(err) == [in_memory] == [num_tokens]
    # Saved once more, the files are the same: nothing of them depends on when.
    before = (tmp_path / f"talk.json{KV}").read_bytes()
    talk(*QUESTIONS, f"/save {file}")
    assert (tmp_path / f"talk.json{KV}").read_bytes() == before


def test_a_basic_cache_saves_and_loads_the_messages_alone(talk, tmp_path: Path):
    file, argv = tmp_path / "talk.json", ("--kv", "basic")
    _, through, _ = talk(*QUESTIONS, LAST, argv=argv)
    _, _, err = talk(*QUESTIONS, f"/save {file}", argv=argv)
    assert "[the K/V were not saved: " in err and "need blocks" in err
    assert f"[saved to {file}: messages: 4]" in err
    assert os.listdir(tmp_path) == ["talk.json"]
    talk(*QUESTIONS, f"/save! {file}")  # with its K/V
    _, out, err = talk(f"/load {file}", LAST, argv=argv)
    assert "[the K/V were not loaded, and will be recomputed: " in err and "need blocks" in err
    assert out == through[-1:] and reused(err) == [0]


def test_only_its_owner_can_read_what_is_saved(talk, tmp_path: Path):
    file = tmp_path / "talk.json"
    files = [file, tmp_path / f"talk.json{KV}"]
    talk(*QUESTIONS, f"/save! {file}")
    modes = [[stat.S_IMODE(each.stat().st_mode) for each in files]]
    for each in files:
        each.chmod(0o664)
    talk(*QUESTIONS, f"/save! {file}")
    modes.append([stat.S_IMODE(each.stat().st_mode) for each in files])
    assert modes == [[0o600, 0o600]] * 2


def test_kv_that_can_not_be_used_are_said_and_the_messages_load(
    talk, tmp_path: Path, model_folder: Callable[..., Path]
):
    file, kv_file = tmp_path / "talk.json", tmp_path / f"talk.json{KV}"
    _, through, _ = talk(*QUESTIONS, LAST)
    talk(*QUESTIONS, f"/save! {file}")
    content = kv_file.read_bytes()

    def loaded(*argv: str) -> tuple[list[str], str]:
        _, out, err = talk(f"/load {file}", LAST, argv=argv)
        assert f"[loaded from {file}: messages: 4]" in err
        lines = [line for line in err.splitlines() if "recomputed" in line]
        assert len(lines) == 1 and reused(err) == [0]
        return out, lines[0].removeprefix("[the K/V were not loaded, and will be recomputed: ")

    kv_file.write_bytes(content[:-1])
    out, why = loaded()
    assert out == through[-1:] and "was truncated: it has" in why
    kv_file.write_bytes(content[:-1] + b"x")
    assert "was altered since it was written" in loaded()[1]
    kv_file.unlink()
    assert "can't be read: No such file" in loaded()[1]
    kv_file.write_bytes(content)
    assert "has another block size than this cache: 16 in the file, 32 here" in loaded(
        "--block-size", "32")[1]  # fmt: skip
    other = model_folder(config={"rope_theta": 20000.0})
    why = loaded("--model", str(other))[1]
    assert re.search(r"has another model than this cache: demo_model \(\w{12}\) in the file, "
                     r"model \(\w{12}\) here", why)  # fmt: skip
    # Without K/V, as ever.
    data = json.loads(file.read_text())
    assert data.pop("kv_file") == kv_file.name
    file.write_text(json.dumps(data))
    _, out, err = talk(f"/load {file}", LAST)
    assert out == through[-1:] and "K/V of" not in err and "not loaded" not in err


def test_the_name_in_a_conversation_leads_nowhere_else(tmp_path: Path):
    file = tmp_path / "talk.json"
    for name, expected in (("/etc/passwd", "passwd"), ("../x", "x"), ("", None), (5, None)):
        file.write_text(json.dumps({"messages": [], "kv_file": name}))
        read = load_messages(file)[1]
        assert read == (None if expected is None else tmp_path / expected)


def test_messages_are_saved_where_kv_can_not_be(
    talk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "talk.json"

    def full(*args: Any, **options: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "save_snapshot", full)
        _, _, err = talk(QUESTIONS[0], f"/save {file}")
    assert "[the K/V were not saved: No space left on device]" in err
    assert f"[saved to {file}: messages: 2]" in err and len(saved_messages(file)) == 2
    assert os.listdir(tmp_path) == ["talk.json"]
    # Another file in the place of the K/V.
    (tmp_path / f"talk.json{KV}").write_text("keep me")
    _, _, err = talk(QUESTIONS[0], f"/save! {file}")
    assert f"{file}{KV} exists and is not a snapshot; choose another name]" in err
    assert (tmp_path / f"talk.json{KV}").read_text() == "keep me"
    # Before the first answer there are none.
    _, _, err = talk("/system Be brief.", f"/save {tmp_path / 'empty.json'}")
    assert "messages: 1]" in err and "not saved" not in err


# Before a conversation


@pytest.fixture
def cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> Callable[..., Path]:
    """What mlx_lm.cache_prompt makes of a prompt, with the ids of its tokens added."""

    def make(prompt: str, model: str = str(demo_model_path()), *more: str) -> Path:
        file = tmp_path / "prompt.safetensors"
        argv = ["cache_prompt", "--model", model, "--prompt", prompt, *more]
        monkeypatch.setattr(sys, "argv", [*argv, "--prompt-cache-file", str(file)])
        cache_prompt.main()
        capsys.readouterr()
        message = {"role": "user", "content": prompt}
        token_ids = load(model)[1].apply_chat_template([message], continue_final_message=True)
        caches, metadata = load_prompt_cache(str(file), return_metadata=True)
        assert len(token_ids) == caches[0].offset
        save_prompt_cache(str(file), caches, metadata | {"token_ids": json.dumps(token_ids)})
        return file

    return make


@pytest.fixture
def answer_of_mlx_lm(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> Callable[[Path, str], str]:
    def answer(file: Path, message: str) -> str:
        argv = ["generate", "--prompt", message, "--max-tokens", "40"]
        monkeypatch.setattr(
            sys, "argv", [*argv, "--prompt-cache-file", str(file), "--verbose", "F"]
        )
        capsys.readouterr()
        # The package has a function of this name.
        importlib.import_module("mlx_lm.generate").main()
        return capsys.readouterr().out.rstrip("\n")

    return answer


STORY = "My name is Tom. The code of apple is 4821. The code of pear is 1717. "


@pytest.mark.parametrize("prompt", [STORY, STORY * 2, "My name is Tom."])
def test_an_answer_behind_a_prompt_cache_is_that_of_mlx_lm(
    run_chat, cached, answer_of_mlx_lm, prompt: str
):
    file = cached(prompt)
    for message in ("What is my name?", "What is the code of apple?"):
        expected = answer_of_mlx_lm(file, message)
        status, out, err = run_chat(message, "--prompt-cache-file", str(file), "--max-tokens", "40")
        assert status == 0, err
        assert out.rstrip("\n") == expected and expected
    assert f"[{demo_model_path()} | CPU | " in run_chat(
        "--prompt-cache-file", str(file), stdin="/stats\n")[2]  # fmt: skip


def test_turns_behind_a_prompt_cache_are_those_behind_its_text(talk, cached):
    # A model of float32 gives the same tokens whether the text was computed at once or not.
    file = cached(STORY)
    questions = ["What is my name?", "What is the code of apple?", "What is the code of pear?"]
    _, out, err = talk(*questions, argv=("--prompt-cache-file", str(file)))
    _, whole, _ = talk(STORY + questions[0], *questions[1:])
    assert out == whole and len(out) == 3
    assert reused(err)[0] > 20 and reused(err) == sorted(reused(err))
    # Branches and another answer keep it; after a reset its tokens are computed again.
    lines = [questions[0], "/fork", questions[1], "/back", "/regenerate", "/reset", questions[0]]
    _, out, err = talk(*lines, argv=("--prompt-cache-file", str(file)))
    assert out[0] == out[2] == out[3] == whole[0] and out[1] == whole[1]
    assert reused(err)[0] > 20 and reused(err)[-1] == 0


def test_what_can_not_follow_a_prompt_cache_is_said(talk, cached, tmp_path: Path):
    file, saved = cached(STORY), tmp_path / "talk.json"
    argv = ("--prompt-cache-file", str(file))
    _, _, err = talk("What is my name?", "/system Be brief.", f"/save {saved}", argv=argv)
    assert "[a system prompt can't follow a prompt cache, which already begins" in err
    assert len(saved_messages(saved)) == 2


def test_prompt_caches_without_token_ids_are_refused_in_a_line(refused, cached):
    file = cached(STORY)
    caches, metadata = load_prompt_cache(str(file), return_metadata=True)
    del metadata["token_ids"]
    save_prompt_cache(str(file), caches, metadata)
    assert (
        f"{file} does not contain the ids of its tokens, like all prompt caches that mlx-lm makes; "
        "give its text as the first message, and --cache-dir to keep the K/V"
    ) in refused("hi", "--prompt-cache-file", str(file))


def test_a_snapshot_stands_before_a_conversation(talk, tmp_path: Path):
    loaded, tokenizer = load(demo_model_path())
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": STORY}], continue_final_message=True, tokenize=False
    )
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    engine = Engine(loaded, tokenizer, kv_cache_bytes="100blocks")
    engine.add_request("a", token_ids)
    while engine.has_unfinished_requests():
        engine.step()
    num_tokens = engine.save_snapshot(tmp_path / "a.snapshot", token_ids)
    engine.export_prompt_cache(tmp_path / "a.safetensors", token_ids)
    rest = tokenizer.decode(token_ids[num_tokens:])
    _, whole, _ = talk(STORY + "What is my name?", LAST)
    models = ((), ("--model", "demo"), ("--model", str(demo_model_path())))
    for name, model in itertools.product(("a.snapshot", "a.safetensors"), models):
        argv = ("--prompt-cache-file", str(tmp_path / name), *model)
        _, out, err = talk(f"{rest}What is my name?", LAST, argv=argv)
        assert out == whole and reused(err)[0] == num_tokens
        # Its K/V have names, so they are saved, too.
        saved = tmp_path / "talk.json"
        _, _, err = talk(f"{rest}What is my name?", f"/save! {saved}", argv=argv)
        assert "; K/V of " in err
        _, out, err = talk(f"/load {saved}", LAST, argv=argv)
        assert out == whole[1:] and reused(err)[0] > num_tokens


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (("--system-prompt", "x"), "--system-prompt can't be combined with --prompt-cache-file"),
        (("--kv", "basic"), "prompt caches need blocks, which kv='basic' does not have"),
        (("--window", "64"), "mlx-lm computes K/V with attention to all tokens, which differ"),
        (
            ("--model", "somewhere/else"),
            "was made with the model {model}, and --model is somewhere",
        ),
        (("--kv-bits", "8"), "holds K/V of float32 in layer 0, and this cache 8 bits in groups"),
    ],
)
def test_what_can_not_be_combined_is_refused_in_a_line(
    refused, cached, argv: tuple[str, ...], line: str
):
    error = refused("hi", "--prompt-cache-file", str(cached(STORY)), *argv)
    assert line.format(model=demo_model_path()) in error


def test_another_model_than_the_file_names_can_be_allowed(
    run_chat, refused, cached, tmp_path: Path
):
    copied = tmp_path / "copied"
    shutil.copytree(demo_model_path(), copied)
    argv = ("--prompt-cache-file", str(cached(STORY)), "--model", str(copied))
    error = refused("What is my name?", *argv)
    assert "create the file again, or use --allow-other-model if they are the same" in error
    status, out, err = run_chat("What is my name?", *argv, "--allow-other-model")
    assert status == 0, err
    assert out == run_chat("What is my name?", *argv[:2])[1] != ""
    error = refused("hi", "--allow-other-model")
    assert "--allow-other-model is of no use without --prompt-cache-file" in error


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("none", "can't be read: No such file or directory"),
        ("text.safetensors", "is not one of mlx-lm's prompt caches"),
    ],
)
def test_files_that_are_no_prompt_cache_are_refused_in_a_line(
    refused, tmp_path: Path, name: str, why: str
):
    (tmp_path / "text.safetensors").write_text("text")
    assert f"{tmp_path / name} {why}" in refused("hi", "--prompt-cache-file", str(tmp_path / name))
