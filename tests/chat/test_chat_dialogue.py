"""Commands that change the conversation, settings, and what is said without --verbose."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.hybrid_folders import make_folder
from helpers.model_zoo import config_of
from helpers.terminal import saved_messages

from mlx_paged import demo_model_path, load
from mlx_paged.cli.chat import program
from mlx_paged.cli.chat.program import setup_arg_parser
from mlx_paged.models import memory

MEMORY = memory.format_nbytes(memory.memory_size())
TEMPLATE_FOR_TWO = (
    "{% for m in messages %}"
    "{% if m.role not in ('user', 'assistant') %}{{ raise_exception('no ' + m.role) }}{% endif %}"
    "{% if 'stop' in m.content %}{{ m.content.nothing.at_all }}{% endif %}"
    "{% if 'never' in m.content %}{{ raise_exception('no never') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


def messages_of(file: Path) -> list[tuple[str, str]]:
    return [(m["role"], m["content"]) for m in saved_messages(file)]


# What is said


def test_one_line_before_the_first_message_and_one_after_each_answer(talk):
    status, out, err = talk("hello", "hello", argv=("--kv-cache-bytes", "64blocks"))
    start, *figures = err.splitlines()
    assert status == 0 and len(out) == len(figures) == 2
    assert start == (
        "[bundled demo model | CPU | context: 1,024 of 4,096 tokens | greedy (the model's) | /help]"
    )
    numbers = (
        r"^\[\d+\.\d\d s to first token \| \d+\.\d tokens/s \| "
        r"(\d+) of (\d+) prompt tokens reused \| (\d+) of 1,024 "
    )
    found = [re.match(numbers + r"tokens of K/V in use\]$", line).groups() for line in figures]
    assert found == [("0", "17", "16"), ("16", "50", "64")]


def test_the_context_is_the_models_where_the_budget_holds_it(talk):
    _, _, err = talk("hello", argv=("--kv-cache-bytes", "256blocks"))
    assert "| context: 4,096 tokens |" in err
    _, _, err = talk("hello", argv=("--kv-cache-bytes", "255blocks", "--verbose"))
    assert (
        "[context: 4,080 of 4,096 tokens, as many as the K/V budget holds; prompt and answer "
        "together]" in err
    )
    _, _, err = talk("hello", argv=("--kv-cache-bytes", "255blocks", "--window", "64"))
    assert "| context without end |" in err


def test_a_model_that_does_not_fit_is_said_to_in_one_line_before_the_first_message(
    talk, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(memory, "memory_size", lambda: 200_000)
    monkeypatch.setattr(memory, "MIN_KV_CACHE_BYTES", 2**21)
    status, _, err = talk("hello")
    assert status == 2 and "or load it with --force" in err
    status, _, err = talk("hello", argv=("--force",))
    warning, start, _ = err.splitlines()
    assert status == 0 and warning.startswith("[engine] the model does not fit into this machine")
    assert "holds 1,008 of its 4,096 tokens of context" in warning and "--kv-bits" in warning
    assert "context: 1,008 of 4,096 tokens" in start


def test_a_model_that_fails_the_check_at_load_runs_with_a_flag(run_chat, refused, tmp_path):
    folder = str(make_folder(tmp_path / "plamo3", config_of("plamo3")))
    error = refused("hello", "--model", folder)
    assert "plamo3' fails the check at load" in error
    assert error.endswith("; to run it all the same, load it with --skip-check")
    status, out, err = run_chat(
        "hello", "--model", folder, "--skip-check", "--max-tokens", "4", "--verbose"
    )
    assert status == 0 and out.strip() and "per sequence" in err


def test_a_wired_limit_is_asked_for_by_a_flag(run_chat, refused, monkeypatch: pytest.MonkeyPatch):
    error = refused("hello", "--wired-limit", "all")
    assert "argument --wired-limit: must be 'recommended' or bytes" in error
    monkeypatch.setattr(memory, "recommended_memory", lambda: 10**9)
    assert refused("hello", "--wired-limit", "2G").endswith(
        "error: [engine] --wired-limit: 2,147,483,648 bytes are more than the 1,000,000,000 that "
        "Metal recommends on this machine; use less, or raise the system's limit with sudo sysctl "
        "iogpu.wired_limit_mb=N"
    )
    monkeypatch.setattr(memory, "recommended_memory", lambda: 0)
    status, _, err = run_chat("hello", "--wired-limit", "recommended")
    assert status == 0 and "[engine] wired_limit has no effect without Metal" in err


def test_quantised_kv_says_its_format_and_the_bytes_of_a_token(talk):
    argv = ("--kv-bits", "K:8,V:4", "--kv-cache-bytes", "64blocks")
    status, out, err = talk("The code of apple is 4821. What is the code of apple?", argv=argv)
    # Per layer 2 heads: 32 + 16 bytes, and a scale and a bias of 4 bytes for K and for V.
    token = "512 bytes a token in K 8 bits in groups of 32, V 4 bits in groups of 32"
    assert status == 0 and "4821" in out[0]
    _, _, err = talk("hello", argv=(*argv, "--verbose"))
    assert (
        f"= 1,024 tokens = 0.00 GB ({token})]\n[memory: weights 4.5 MB, activations some 90 MB"
        in err
    )
    _, _, err = talk("hello", argv=("--kv-cache-bytes", "65blocks", "--verbose"))
    assert "bytes a token in float32); grows into it]" in err and "\n[matmul: MLX's]\n" in err


def test_a_basic_cache_counts_blocks_as_a_paged_one_does(talk):
    _, _, err = talk("hello", argv=("--kv", "basic", "--kv-cache-bytes", "64blocks"))
    start, figures = err.splitlines()
    assert "| CPU | context: 1,024 of 4,096 tokens |" in start
    assert re.search(r"prompt tokens reused \| \d+ of 1,024 tokens of K/V in use\]$", figures)


def test_a_budget_larger_than_the_memory_is_questioned_in_one_line(talk):
    _, out, err = talk("hello", argv=("--kv-cache-bytes", "1000T"))
    assert len(out) == 1
    assert re.search(
        r"^\[the K/V budget of 1,099,511\.6 GB exceeds this machine's memory of [\d.]+ GB; "
        "see --kv-",
        err,
        re.M,
    )
    assert "exceeds" not in talk("hello", argv=("--kv-cache-bytes", "64M"))[2]


@pytest.mark.parametrize("kind", ["paged", "basic"])
def test_a_cut_answer_says_which_limit_it_reached(talk, kind: str):
    count = "Count from 5 to 60."
    _, _, err = talk(count, argv=("--kv", kind, "--max-model-len", "40"))
    assert (
        "[the answer was cut: the context of 40 tokens is full (--max-model-len); /reset begins"
        in err
    )
    assert "context: 40 tokens" in err
    _, _, err = talk(count, argv=("--kv", kind, "--max-tokens", "5"))
    assert "[the answer was cut at --max-tokens 5]" in err
    _, _, err = talk(count, argv=("--kv", kind, "--kv-cache-bytes", "2blocks"))
    assert "[the answer was cut: the K/V budget is full; raise --kv-cache-bytes or /reset]" in err


@pytest.mark.parametrize("kind", ["paged", "basic"])
def test_a_message_longer_than_the_context_costs_the_turn_and_not_the_dialogue(talk, kind: str):
    status, out, err = talk("hello " * 50, "hello", argv=("--kv", kind, "--max-model-len", "40"))
    assert status == 0 and out == ["Hello! How can I help you?"]
    assert "at most 40 tokens together" in err


def test_answers_have_no_limit_but_the_context(talk, model_folder):
    folder = model_folder(
        tokenizer_config={"eos_token": "<|endoftext|>"},
        config={"eos_token_id": 3, "max_position_embeddings": 400},
        generation_config={"eos_token_id": 3},
    )
    _, _, err = talk("hello", argv=("--model", str(folder)))
    # No flag, as the model was made for no more.
    assert "[the answer was cut: the context of 400 tokens is full; /reset begins" in err


# Commands


def test_commands_ignore_case_and_an_unknown_one_is_never_sent_to_the_model(talk, tmp_path: Path):
    file = tmp_path / "saved.json"
    lines = [
        "/STATS",
        "  /Stats ",
        "/wat is this",
        "/",
        "/usr/bin/python is what?",
        "/stats now",
        f"/SAVE {file}",
    ]
    status, out, err = talk(*lines)
    assert (status, out) == (0, [])
    assert err.count("messages: 0, tokens held: 0") == 2
    for name in ("/wat", "/", "/usr/bin/python"):
        assert (
            f"[unknown command {name}; /help lists them, and // begins a message with a slash]"
            in err
        )
    assert "[/stats takes no argument]" in err
    assert messages_of(file) == []


def test_two_slashes_send_a_message_that_begins_with_one(talk, tmp_path: Path):
    file = tmp_path / "saved.json"
    _, out, _ = talk("//etc is a folder", f"/save {file}")
    assert len(out) == 1 and messages_of(file)[0] == ("user", "/etc is a folder")


def test_regenerate_replaces_the_last_answer(talk, tmp_path: Path):
    file = tmp_path / "saved.json"
    _, out, err = talk("/regenerate", "hello", "/regenerate", f"/save {file}")
    assert "there is no message of the user yet" in err
    assert len(out) == 2 and messages_of(file) == [("user", "hello"), ("assistant", out[1])]
    assert "[greedy: the same answer each time; /set temp 0.7 varies it]" in err
    _, out, _ = talk("/set temp 5", "/set max-tokens 20", "hello", "/regenerate")
    assert len(out) >= 2 and out[0] != out[-1]


def test_edit_replaces_the_last_message_and_its_answer(talk, tmp_path: Path):
    file = tmp_path / "saved.json"
    lines = [
        "/edit x",
        "My name is Tom.",
        "/edit My name is Ann.",
        "What is my name?",
        "/edit",
        f"/save {file}",
    ]
    _, out, err = talk(*lines)
    assert out[-1] == "Your name is Ann."
    assert "there is no message to edit yet" in err and "/edit needs the new text" in err
    assert [text for role, text in messages_of(file) if role == "user"] == [
        "My name is Ann.",
        "What is my name?",
    ]


@pytest.mark.parametrize("again", ["/regenerate", "/edit {long}"])
def test_an_answer_that_can_not_be_replaced_stays(talk, tmp_path: Path, again: str):
    file = tmp_path / "saved.json"
    # The second time there is no room: the system prompt has grown.
    lines = ["hello", f"/system {'word ' * 40}", again.format(long="word " * 100), f"/save {file}"]
    _, out, err = talk(*lines, argv=("--max-model-len", "60"))
    assert len(out) == 1 and "at most 60 tokens together" in err
    assert messages_of(file)[1:] == [("user", "hello"), ("assistant", out[0])]


def test_the_system_prompt_is_shown_set_and_removed_and_stays_over_a_reset(talk, tmp_path: Path):
    files = [tmp_path / f"{index}.json" for index in range(3)]
    lines = [
        "/system",
        "/system Be brief.",
        "/SYSTEM",
        "hello",
        f"/save {files[0]}",
        "/reset",
        f"/save {files[1]}",
    ]
    _, out, err = talk(*lines, '/system ""', f"/save {files[2]}")
    said = [line for line in err.splitlines() if "system prompt" in line]
    assert said == [
        "[no system prompt]",
        "[system prompt set]",
        "[system prompt: Be brief.]",
        "[system prompt removed]",
    ]
    system = ("system", "Be brief.")
    assert messages_of(files[0]) == [system, ("user", "hello"), ("assistant", out[0])]
    assert [messages_of(file) for file in files[1:]] == [[system], []]


def test_settings_are_listed_and_changed_and_a_wrong_one_is_one_line(talk):
    _, _, err = talk(
        "/set",
        "/set temp",
        "/set TEMP 0.7",
        "/set top_p=0.5",
        "/set --top-k 3",
        "/set",
        argv=("--seed", "7"),
    )
    assert (
        "temp              0\ntop-p             1\ntop-k             0\nmin-p             0\n"
        "xtc-probability   0\nxtc-threshold     0.1\nmax-tokens        -1\n"
        "seed              7\n" in err
    )
    assert "[temp 0]\n[temp 0.7]\n[top-p 0.5]\n[top-k 3]\n" in err
    assert "temp              0.7\ntop-p             0.5\ntop-k             3\n" in err
    no_mood = (
        "[unknown setting 'mood'; the settings are temp, top-p, top-k, min-p, xtc-probability, "
        "xtc-threshold, max-tokens, seed, thinking]"
    )
    for line, said in {
        "/set temp hot": "[temp must be a number, at least 0, got 'hot']",
        "/set top-p 2": "[top-p must be within 0..1, got '2']",
        "/set max-tokens 0": "[max-tokens must be a whole number, at least 1, or -1, got '0']",
        "/set thinking loud": "[thinking must be show or hide, got 'loud']",
        "/set mood 3": no_mood,
        "/set mood": no_mood,
    }.items():
        assert said in talk(line)[2].splitlines()


def test_a_limit_that_is_set_cuts_the_next_answer(talk):
    _, _, err = talk("/set max-tokens 3", "hello")
    assert "[the answer was cut at --max-tokens 3]" in err


def test_the_same_seed_set_again_brings_the_same_words(talk, tmp_path: Path):
    files = [tmp_path / f"{index}.json" for index in range(3)]
    turns = [line for file in files for line in ("/set seed 5", "hello", f"/save {file}", "/reset")]
    turns[8] = "/set seed 6"
    talk(*turns, argv=("--temp", "3", "--max-tokens", "15"))
    first, again, other = map(messages_of, files)
    assert first == again != other


# Saving and loading


def test_a_saved_conversation_goes_on_where_it_was(talk, tmp_path: Path):
    file = tmp_path / "saved.json"
    talk("My name is Tom.", f"/save {file}", argv=("--system-prompt", "Be brief."))
    _, out, err = talk(f"/load {file}", "What is my name?", "/system")
    assert out == ["Your name is Tom."]
    assert (
        f"[loaded from {file}: messages: 3; K/V of 32 tokens]" in err
        and "[system prompt: Be brief.]" in err
    )


def test_a_list_of_messages_can_be_loaded_and_its_open_question_answered(talk, tmp_path: Path):
    file = tmp_path / "messages.json"
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    file.write_text(json.dumps([{"role": "user", "content": parts}]))
    _, out, err = talk(f"/load {file}", "/regenerate")
    assert out == ["Hello! How can I help you?"]
    assert "messages: 1; /regenerate answers the last one]" in err


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (None, "can't be read: No such file or directory"),
        (b"{nope", "is not a conversation: Expecting property name"),
        (b"\xff\xfe", "is not a conversation: "),
        (b"[" * 100_000, "is not a conversation: "),
        (b"{}", "is not a conversation: it has no list of messages"),
        (b'{"version": 2, "messages": []}', "has version 2, and only version 1 can be read"),
        (b"[]", "can't be continued: messages is empty"),
        (
            b'[{"role": "user", "content": 7}]',
            "can't be continued: the content of messages[0] must be a text",
        ),
        (
            b'[{"role": "user", "content": [{"type": "image"}]}]',
            "part 0 of messages[0] is of type 'image'; only parts of type 'text' are supported",
        ),
    ],
)
def test_what_is_no_conversation_is_not_loaded_and_the_one_that_is_there_lives_on(
    talk, tmp_path: Path, content: bytes | None, line: str
):
    file = tmp_path / "file.json"
    if content is not None:
        file.write_bytes(content)
    _, out, err = talk("My name is Tom.", f"/load {file}", "What is my name?")
    assert out[-1] == "Your name is Tom."
    assert len([said for said in err.splitlines() if str(file) in said and line in said]) == 1


TEMPLATE_THAT_QUOTES = (
    "{% for m in messages %}{% if m.role not in ('system', 'user') %}"
    "{{ raise_exception('no role ' + m.role) }}{% endif %}{{ m.content }}{% endfor %}"
)
ESCAPES = "\x1b[2J\x1b]0;owned\x07\x9b31m"


@pytest.mark.parametrize(
    ("content", "commands"),
    [
        ([{"role": "system", "content": ESCAPES}], ["/system"]),
        ([{"role": ESCAPES, "content": "hello"}], []),
        ([{"role": "user", "content": [{"type": ESCAPES}]}], []),
        ({"version": ESCAPES, "messages": []}, []),
        ({"messages": [{"role": "user", "content": "a"}], "kv_file": ESCAPES}, []),
        ({"messages": ESCAPES}, []),
        (ESCAPES, []),
    ],
)
def test_a_file_from_elsewhere_moves_no_cursor_and_sets_no_title(
    talk, tmp_path: Path, model_folder: Callable[..., Path], content: object, commands: list[str]
):
    folder = model_folder({"chat_template.jinja": TEMPLATE_THAT_QUOTES})
    file = tmp_path / "from_elsewhere.json"
    file.write_text(json.dumps(content))
    status, out, err = talk(f"/load {file}", *commands, argv=("--model", str(folder)))
    assert (status, out) == (0, [])
    assert re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", err) is None
    assert str(file) in err


def test_only_a_saved_conversation_is_overwritten(talk, tmp_path: Path):
    saved, notes, link = tmp_path / "saved.json", tmp_path / "notes.txt", tmp_path / "link.json"
    notes.write_text("precious")
    link.symlink_to(saved)
    saved_before = ["hello", f"/save {saved}", "hello", f"/save {link}", f"/save! {link}"]
    _, _, err = talk(
        *saved_before,
        f"/save! {notes}",
        f"/save {tmp_path}",
        "/save /dev/null",
        "/save /no/such/folder/x",
        "/save",
    )
    assert len(messages_of(saved)) == 4 and link.is_symlink()
    assert f"[{link} exists; /save! {link} overwrites it]" in err
    assert notes.read_text() == "precious"
    assert f"[{notes} exists and is not a saved conversation; choose another name]" in err
    assert f"[{tmp_path} exists and is not a saved conversation; choose another name]" in err
    assert "[/dev/null exists and is not a saved conversation; choose another name]" in err
    assert "[/no/such/folder/x can't be written: No such file or directory]" in err
    assert "[/save needs FILE]" in err
    assert sorted(os.listdir(tmp_path)) == [
        "link.json",
        "notes.txt",
        "saved.json",
        "saved.json.safetensors",
    ]


# Templates


def test_a_template_that_refuses_is_one_line_and_the_conversation_lives_on(
    talk, model_folder: Callable[..., Path]
):
    folder = model_folder(texts={"chat_template.jinja": TEMPLATE_FOR_TWO})
    lines = ["My name is Tom.", "never", "stop", "What is my name?", "/stats"]
    status, out, err = talk(*lines, argv=("--model", str(folder)))
    assert status == 0 and out[-1] == "Your name is Tom." and "messages: 4," in err
    assert "[the model's chat template refuses the messages: no never]" in err.splitlines()
    assert "[[" not in err
    assert "[the model's chat template fails: UndefinedError: " in err


def test_a_system_prompt_begins_the_question_for_a_template_that_takes_none(
    talk, model_folder: Callable[..., Path]
):
    folder = model_folder(texts={"chat_template.jinja": TEMPLATE_FOR_TWO})
    lines = ["/system My name is Tom.", "What is my name?"]
    status, out, err = talk(*lines, argv=("--model", str(folder)))
    assert (status, out[-1]) == (0, "Your name is Tom.") and "refuses" not in err


def test_a_template_that_refuses_the_one_message_is_the_programs_error(
    run_chat, model_folder: Callable[..., Path]
):
    folder = model_folder(texts={"chat_template.jinja": "{{ raise_exception('not\ntoday') }}"})
    status, out, err = run_chat("hello", "--model", str(folder))
    assert (status, out) == (2, "")
    assert err.splitlines()[-1].endswith(
        "error: [chat template] the model's chat template refuses the messages: not today"
    )


# The model's own sampling


def sampling(talk: Any, folder: Path, *argv: str) -> str:
    _, _, err = talk("hello", argv=("--model", str(folder), "--max-tokens", "2", *argv))
    return err.splitlines()[0].split(" | ")[-2]


def test_the_models_generation_config_gives_the_sampling_and_flags_win(
    talk, model_folder: Callable[..., Path]
):
    own = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20}
    folder = model_folder(texts={"generation_config.json": json.dumps(own)})
    assert sampling(talk, folder) == "temp 0.6, top-p 0.95, top-k 20 (the model's)"
    assert (
        sampling(talk, folder, "--temp", "1", "--top-k", "0") == "temp 1, top-p 0.95 (the model's)"
    )
    assert sampling(talk, folder, "--temp", "0") == "greedy (the model's)"
    assert sampling(talk, folder, "--no-generation-config") == "greedy"
    assert (
        sampling(talk, folder, "--no-generation-config", "--temp", "2", "--min-p", "0.1")
        == "temp 2, min-p 0.1"
    )
    _, _, err = talk("/set", argv=("--model", str(folder), "--verbose", "--temp", "1"))
    assert (
        "[sampling: temp 1, top-p 0.95, top-k 20; top-p, top-k from generation_config.json]" in err
    )
    assert "temp              1\ntop-p             0.95\ntop-k             20\n" in err


def test_xtc_is_asked_for_by_flags_and_changed_like_any_setting(
    talk, model_folder: Callable[..., Path]
):
    flags = ("--temp", "1", "--xtc-probability", "0.5", "--xtc-threshold", "0.2")
    assert sampling(talk, model_folder(), *flags) == "temp 1, xtc 0.5 above 0.2"
    _, _, err = talk("/set xtc-threshold 0.6", "/set xtc_probability 1", argv=("--temp", "1"))
    assert "[xtc-threshold must be within 0..0.5, got '0.6']" in err
    assert "[xtc-probability 1]" in err


def test_xtc_spares_the_line_ends_and_the_end_of_an_answer():
    args = setup_arg_parser().parse_args(["--xtc-probability", "0.5"])
    _, settings = program._load(args)
    _, tokenizer = load(demo_model_path())
    spared = [*tokenizer.encode("\n", add_special_tokens=False), *tokenizer.eos_token_ids]
    assert list(settings.next_params().xtc_special_tokens) == spared and len(spared) > 1
    assert not settings.next_params().skip_special_tokens


@pytest.mark.parametrize(
    ("config", "shown"),
    [
        ({"do_sample": False, "temperature": 0.6, "top_k": 20}, "greedy (the model's)"),
        ({"do_sample": True}, "temp 1 (the model's)"),
        ({"temperature": 0.5, "top_k": -1, "top_p": None}, "temp 0.5 (the model's)"),
        ({"temperature": 0.5, "top_p": 0}, "greedy (the model's)"),
        ({}, "greedy"),
    ],
)
def test_what_a_generation_config_means(
    talk, model_folder: Callable[..., Path], config: dict, shown: str
):
    folder = model_folder(texts={"generation_config.json": json.dumps(config)})
    assert sampling(talk, folder) == shown


def test_a_folder_without_a_generation_config_is_greedy(talk, model_folder: Callable[..., Path]):
    folder = model_folder()
    (folder / "generation_config.json").unlink()
    assert sampling(talk, folder) == "greedy"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("{nope", "generation_config.json can't be read: Expecting property name"),
        ("[1]", "generation_config.json can't be read: it is not a JSON object"),
        (
            '{"temperature": "hot"}',
            "generation_config.json must be a number, at least 0, got 'hot'",
        ),
        (
            '{"temperature": Infinity}',
            "generation_config.json must be a number, at least 0, got inf",
        ),
        ('{"temperature": true}', "generation_config.json must be a number, at least 0, got True"),
        ('{"top_p": 1.5}', "generation_config.json must be a number within 0..1, got 1.5"),
        (
            '{"top_k": 2.5}',
            "generation_config.json must be a whole number, at least 0, or -1, got 2.5",
        ),
        ('{"do_sample": "yes"}', "generation_config.json must be true or false, got 'yes'"),
        (
            '{"eos_token_id": "end"}',
            "generation_config.json must be a token id or a list of them, got 'end'",
        ),
    ],
)
def test_a_bad_generation_config_is_one_clear_line(
    refused, model_folder: Callable[..., Path], text: str, line: str
):
    folder = model_folder(texts={"generation_config.json": text})
    assert line in refused("hello", "--model", str(folder))


def test_a_broken_generation_config_can_be_left_out(talk, model_folder: Callable[..., Path]):
    folder = model_folder(texts={"generation_config.json": '{"temperature": "hot"}'})
    assert sampling(talk, folder, "--no-generation-config") == "greedy"


REPETITIVE = "repeat: one two three four. one two three four. one two three four. one two"


@pytest.mark.parametrize("drafter", [[], ["--draft-model", str(demo_model_path())]], ids=str)
def test_drafts_change_no_answer_and_are_counted(run_chat: Callable[..., Any], drafter: list[str]):
    status, plain, errors = run_chat(REPETITIVE, "-m", "40")
    assert status == 0 and "drafts" not in errors
    status, answer, errors = run_chat(REPETITIVE, "-m", "40", "--num-draft-tokens", "7", *drafter)
    assert (status, answer) == (0, plain)
    if not drafter:  # A model of the same size does not pay as a draft model.
        words = r"\| (\d+\.\d) tokens per step, drafts accepted (\d+)%(, \d+%)* \|"
        figures = re.search(words, errors)
        assert figures is not None and float(figures[1]) > 1 and 0 < int(figures[2]) <= 100


def test_all_figures_of_drafts_are_in_verbose_answers_and_in_stats(talk):
    flags = ("-m", "40", "--num-draft-tokens", "7", "--verbose")
    errors = talk(REPETITIVE, "/stats", argv=flags)[2]
    answer, stats = re.findall(
        r"rafts: (\d+ of \d+ accepted \(\d+\.\d%\), by position \d+%(?:, \d+%)*); "
        r"\d\.\d tokens per step(?: with drafts)?\n",
        errors,
    )
    assert answer == stats


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--num-draft-tokens", "8"], "must be a whole number within 0..7, got '8'"),
        (["--draft-model", "nowhere"], "--draft-model: "),
        (["--draft-model", str(demo_model_path()), "--kv", "basic"], "--draft-model needs kv="),
        (
            ["--draft-model", str(demo_model_path()), "--num-draft-tokens", "0"],
            "--num-draft-tokens must be at least 1 with a draft model",
        ),
    ],
)
def test_drafts_that_can_not_be_made_are_refused(refused, arguments: list[str], reason: str):
    assert reason in refused("hi", *arguments)
