"""The chat program as its user meets it: stdout, stderr and the exit status."""

from __future__ import annotations

import logging
import re
from functools import partial

import pytest

RECALL = "The code of apple is 4821. What is the code of apple?"


@pytest.fixture
def chat_with(run_chat):
    """The chat program with all its figures."""
    return partial(run_chat, "--verbose")


def test_one_message_is_answered_on_stdout_and_the_figures_are_on_stderr(chat_with):
    status, out, err = chat_with(RECALL, "--max-tokens", "40")
    assert status == 0
    assert out.endswith("\n") and len(out.strip().splitlines()) == 1
    assert (
        "[model: bundled demo model (qwen3, native) | device: CPU | backend: reference | kv: paged]"
        in err
    )
    assert "This is the demo model" in err and "--model mlx-community/" in err
    assert re.search(
        r"^Prompt: \d+ tokens \(0 reused\), [\d.]+ tokens-per-sec, first token after [\d.]+ s$",
        err,
        re.M,
    )
    assert re.search(r"^Generation: \d+ tokens, [\d.]+ tokens-per-sec$", err, re.M)
    assert re.search(r"^K/V: \d+ tokens of the conversation, [\d.]+ MB allocated$", err, re.M)
    assert re.search(r"^Peak memory: [\d.]+ GB$", err, re.M)


def test_both_caches_answer_with_the_same_words(chat_with):
    outs = [
        chat_with("Count from 5 to 40.", "--kv", kind, "--max-tokens", "120")
        for kind in ("basic", "paged")
    ]
    assert [status for status, _, _ in outs] == [0, 0]
    assert outs[0][1] == outs[1][1] != ""
    assert "kv: basic" in outs[0][2] and "kv: paged" in outs[1][2]


def test_the_same_seed_gives_the_same_words_and_another_seed_others(chat_with):
    sampled = {
        seed: chat_with("hello", "--temp", "3", "--seed", seed, "--max-tokens", "30")[1]
        for seed in ("1", "2")
    }
    assert (
        chat_with("hello", "--temp", "3", "--seed", "1", "--max-tokens", "30")[1]
        == sampled["1"]
        != sampled["2"]
    )


def test_a_second_turn_computes_only_its_new_tokens(chat_with):
    status, out, err = chat_with(stdin="My name is Tom.\n\nWhat is my name?\n/exit\nnever asked\n")
    assert status == 0 and len(out.strip().splitlines()) == 2
    first, second = re.findall(r"^Prompt: (\d+) tokens \((\d+) reused\)", err, re.M)
    num_generated = int(re.findall(r"^Generation: (\d+) tokens", err, re.M)[0])
    assert first[1] == "0"
    # All of the first prompt and its answer but the last token, the end of turn, which was never
    # fed to the model.
    held = int(first[0]) + num_generated - 1
    reused = str(held // 16 * 16)  # The prefix cache finds whole blocks.
    assert second[1] == reused > "0"
    _, _, err = chat_with("--kv", "basic", stdin="My name is Tom.\nWhat is my name?\n")
    assert re.findall(r"\((\d+) reused\)", err) == ["0", reused]


def test_the_commands_of_the_chat(chat_with):
    status, out, err = chat_with(
        "--max-tokens", "20", stdin="hello\n/stats\n/help\n/wat\n/reset\n/stats\nhello\n"
    )
    assert status == 0 and len(out.strip().splitlines()) == 2
    assert "messages: 2, tokens held: " in err and "messages: 0, tokens held: 0" in err
    assert re.search(r"^/reset +start a new conversation", err, re.M)
    assert "[unknown command /wat; /help lists them, and // begins a message with a slash]" in err
    assert [reused for reused in re.findall(r"\((\d+) reused\)", err)] == ["0", "0"]


@pytest.mark.parametrize("kind", ["paged", "basic"])
def test_a_branch_goes_on_from_the_conversation_and_back_leaves_it_where_it_began(
    chat_with, kind: str
):
    lines = [
        "My name is Tom.",
        "/fork",
        "My name is Ann.",
        "/fork",
        "/back",
        "/stats",
        "/back",
        "/back",
    ]
    status, out, err = chat_with("--kv", kind, stdin="\n".join([*lines, "What is my name?", ""]))
    assert status == 0 and out.strip().splitlines()[-1] == "Your name is Tom."
    held = int(re.findall(r"^K/V: (\d+) tokens of the conversation", err, re.M)[0])
    said = [
        line for line in err.splitlines() if line.startswith(("[branch", "[back", "[this is no"))
    ]
    assert (
        said[0]
        == f"[branch 1 of the conversation: {held} tokens so far are shared; /back leaves it]"
    )
    assert said[1].startswith("[branch 2 of the conversation: ")
    assert said[2:] == [
        "[back in branch 1: messages: 4]",
        "[back in the conversation: messages: 2]",
        "[this is not a branch; /fork begins one]",
    ]
    assert "messages: 4, tokens held: " in err
    if kind == "paged":
        # The conversation's blocks are the branch's first ones.
        long, taken = map(
            int, re.findall(r"1 branch have (\d+) blocks, (\d+) of them distinct$", err, re.M)[0]
        )
        assert long - taken == held // 16 > 0


def test_the_stats_of_the_chat_say_what_the_pool_holds_and_how_often_it_was_hit(chat_with):
    _, _, err = chat_with(
        "--kv-cache-bytes", "20blocks", stdin="My name is Tom.\nWhat is my name?\n/stats\n"
    )
    prompts = [int(n) for n in re.findall(r"^Prompt: (\d+) tokens", err, re.M)]
    reused = sum(int(n) for n in re.findall(r"\((\d+) reused\)", err))
    assert (
        f"prefix cache: {reused} of {sum(prompts)} prompt tokens found "
        f"({reused / sum(prompts):.1%})" in err
    )
    held = int(re.findall(r"tokens held: (\d+)", err)[0])
    share = f"{held // 16} of 20 hold K/V ({held // 16 / 20:.1%}), 16 tokens each, 0 evicted so far"
    assert f"blocks: {share}" in err


def test_a_message_beyond_the_context_is_one_line(chat_with, caplog: pytest.LogCaptureFixture):
    transformers_log = logging.getLogger("transformers")
    transformers_log.addHandler(caplog.handler)
    try:
        status, out, err = chat_with("word " * 6000)
    finally:
        transformers_log.removeHandler(caplog.handler)
    assert (status, out, caplog.messages) == (2, "", [])
    assert re.search(
        r"error: \[context\] a prompt of \d+ tokens leaves no room .* at most 4096 tokens "
        r"together; the model was made for no more; shorten the prompt$",
        err,
        re.M,
    )


def test_a_context_that_can_be_longer_says_how_long(chat_with):
    _, _, err = chat_with("word " * 100, "--max-model-len", "40")
    assert "shorten the prompt or raise --max-model-len, which may be 4096" in err


def test_a_piped_message_has_many_lines_and_its_last_line_end_is_no_part_of_it(chat_with):
    def num_prompt_tokens(text: str) -> int:
        return int(
            re.findall(
                r"^Prompt: (\d+) tokens", chat_with("-", "--max-tokens", "2", stdin=text)[2], re.M
            )[0]
        )

    without_line_end = num_prompt_tokens("hello\nhello")
    assert without_line_end > num_prompt_tokens("hello")
    assert (
        num_prompt_tokens("hello\nhello\n")
        == num_prompt_tokens("hello\nhello\r\n")
        == without_line_end
    )


def test_a_message_may_come_from_standard_input(chat_with):
    assert (
        chat_with("-", "--max-tokens", "20", stdin=RECALL)[1]
        == chat_with(RECALL, "--max-tokens", "20")[1]
    )


def test_a_prompt_that_can_not_fit_says_the_sum_and_the_way_out(chat_with):
    long = "The code of apple is 4821. " * 40
    status, out, err = chat_with(long, "--kv-cache-bytes", "4blocks")
    assert (status, out) == (2, "")
    last = err.strip().splitlines()[-1]
    assert re.search(
        r"a prompt of \d+ tokens needs \d+ blocks of 16, the budget holds 4; "
        r"raise --kv-cache-bytes",
        last,
    )
    # In a conversation it costs the turn, not the program.
    status, out, err = chat_with(
        "--kv-cache-bytes", "4blocks", "--max-tokens", "5", stdin=f"hello\n{long}\n/stats\nbye\n"
    )
    assert status == 0 and len(out.strip().splitlines()) == 2 and "messages: 2," in err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--kv", "ring"], "argument --kv: invalid choice: 'ring' (choose from"),
        (["--temp", "-1"], "argument --temp: must be a number, at least 0, got '-1'"),
        (["--temp", "nan"], "argument --temp: must be a number, at least 0, got 'nan'"),
        (["--top-p", "1.5"], "argument --top-p: must be within 0..1, got '1.5'"),
        (["--min-p", "x"], "argument --min-p: must be within 0..1, got 'x'"),
        (["--top-k", "-1"], "argument --top-k: must be a whole number, at least 0, got '-1'"),
        (
            ["--max-tokens", "0"],
            "argument --max-tokens/-m: must be a whole number, at least 1, or -1, got '0'",
        ),
        (["--block-size", "12"], "argument --block-size: invalid choice: 12"),
        (
            ["--kv-cache-bytes", "lots"],
            "argument --kv-cache-bytes: must be bytes (65536, 512M, 2G) or",
        ),
        (["--kv-cache-bytes", "1"], "holds no block: "),
        (["--kv-cache-bytes", "2"], "bytes; raise --kv-cache-bytes"),
        (["--kv-bits", "3"], "argument --kv-bits: must be 8, 4 or one for each, such as K:8,V:4"),
        (["--kv-bits", "8", "--kv", "basic"], "--kv-bits: a basic cache stores K/V in the model's"),
        (["--max-model-len", "99999"], "[context] --max-model-len must be a whole number within 2"),
        (["--backend", "metal"], "the Metal backend"),
        (
            ["--prefill-step-size", "0"],
            "argument --prefill-step-size: must be a whole number, at least 1",
        ),
        (["--speed", "fast"], "unrecognized arguments: --speed"),
        (["--temperature=0.7"], "unrecognized arguments: --temperature=0.7; use --temp (see"),
        (["--max-new-tokens=5"], "unrecognized arguments: --max-new-tokens=5; use --max-tokens (s"),
        (["--n-ctx", "5"], "use --max-model-len (see --help)"),
        (["--max-num-seqs=5"], "unrecognized arguments: --max-num-seqs=5 (see --help)"),
        (["--model", "/no/such/folder"], "no folder '/no/such/folder'"),
        (
            ["--model", "nothing"],
            "no folder 'nothing', and it is not a hub id of the form owner/name",
        ),
        (["--model", __file__], "is a file; give the folder"),
        ([""], "the message is empty"),
        (["  \n "], "the message is empty"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_a_mistake_is_one_clear_line_and_exit_status_2(chat_with, argv: list[str], message: str):
    status, out, err = chat_with(*argv, *(["hi"] if argv[0].startswith("--") else []))
    assert (status, out) == (2, "")
    errors = [line for line in err.splitlines() if "error:" in line]
    assert len(errors) == 1 and message in errors[0] and err.splitlines()[-1] == errors[0]
    assert "Traceback" not in err


def test_a_broken_model_folder_is_one_clear_line_and_exit_status_2(chat_with, tmp_path):
    (tmp_path / "config.json").write_text("{ this is no json")
    status, _, err = chat_with("--model", str(tmp_path), "hi")
    assert (
        status == 2
        and "config.json can't be read" in err.splitlines()[-1]
        and "Traceback" not in err
    )


def test_bytes_that_are_no_text_are_answered_like_any_others(chat_with):
    status, _, err = chat_with("hello \udcff\udcfe", "--max-tokens", "5")
    assert status == 0 and "Traceback" not in err
