"""The server's command line: every mistake is one line and status 2, every option has a flag."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from mlx_paged.cli import flags as shared_flags
from mlx_paged.options.engine_options import EngineOptions
from mlx_paged.server import program
from mlx_paged.server.http import logs
from mlx_paged.server.program import read_settings, setup_arg_parser, template_options
from mlx_paged.server.settings import ApiKey, ServerSettings, in_words, read_api_keys

ENGINE_FLAGS = shared_flags.engine_flags("server")
engine_options = partial(shared_flags.engine_options, program="server")


@pytest.fixture
def fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    """What the server with these flags says, in one line, as it ends with status 2."""
    monkeypatch.setattr(logs, "setup_logging", lambda *_: None)

    def run(*argv: str) -> str:
        status = program.main(list(argv), "serve")
        said = capsys.readouterr()
        lines = [line for line in said.err.splitlines() if not line.startswith("[loading")]
        assert (status, said.out, len(lines)) == (2, "", 1), said.err
        assert lines[0].startswith("serve: error: ")
        return lines[0].removeprefix("serve: error: ")

    return run


@pytest.fixture
def loading_raises(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """Where a model would be loaded, raise an error instead."""

    def set_error(error: BaseException) -> None:
        def load(*_: object) -> None:
            raise error

        monkeypatch.setattr(program, "make_service", load)
        monkeypatch.setattr(logs, "setup_logging", lambda *_: None)

    return set_error


# Flags and options


def test_every_option_of_the_engine_has_a_flag_and_no_other_has():
    # No text stands for a function, which makes a tier, nor for a list.
    assert set(ENGINE_FLAGS) == set(EngineOptions.__annotations__) - {"tier", "token_budgets"}
    flags = {name for action in setup_arg_parser("x")._actions for name in action.option_strings}
    assert set(ENGINE_FLAGS.values()) <= flags


def test_without_flags_options_are_the_engines_own_defaults():
    from mlx_paged.options.config import SchedulerConfig

    options = engine_options(setup_arg_parser("x").parse_args([]))
    own = {name: value for name, value in options.items() if value is not None}
    assert own == {
        "adapters": [],
        "deterministic": False,
        "backend": "auto",
        "block_size": 16,
        "kv": "paged",
        "matmul": "auto",
        "enable_prefix_caching": SchedulerConfig.enable_prefix_caching,
        "max_num_seqs": SchedulerConfig.max_num_seqs,
        "preallocate": False,
        "num_history_tokens": 2**20,  # so that /v1/cache has something to say
        "priority_steps": SchedulerConfig.priority_steps,
        "watermark": SchedulerConfig.watermark,
    }


def test_every_flag_of_the_engine_reaches_its_option():
    given = {
        "adapters": ("sql=adapters/s=ql", [("sql", "adapters/s=ql")]),
        "backend": ("reference", "reference"),
        "block_size": ("32", 32),
        "cache_dir": ("~/kv", "~/kv"),
        "cache_dir_size": ("1.5M", 3 * 2**19),
        "cache_dir_ttl": ("7d", 604_800.0),
        "cache_dir_writes": ("50G/day", 50 * 2**30),
        "deterministic": (None, True),
        "kv": ("basic", "basic"),
        "kv_cache_bytes": ("64blocks", "64blocks"),
        "kv_format": ("K:8,V:4", "K:8,V:4"),
        "matmul": ("rows", "rows"),
        "max_adapter_rank": ("32", 32),
        "max_adapters": ("4", 4),
        "max_model_len": ("512", 512),
        "max_num_batched_tokens": ("300", 300),
        "max_num_mixed_tokens": ("200", 200),
        "max_num_seqs": ("7", 7),
        "mixed_step_seconds": ("0.5", 0.5),
        "num_draft_tokens": ("3", 3),
        "num_history_tokens": ("0", 0),
        "num_sink_tokens": ("5", 5),
        "preallocate": (None, True),
        "prefill_step_seconds": ("0", 0.0),
        "priority_steps": ("9", 9),
        "run_ahead": (None, True),
        "seed": ("11", 11),
        "swap_bytes": ("0", "0"),
        "watermark": ("0.25", 0.25),
        "window": ("128", 128),
        "wired_limit": ("2G", 2**31),
        "enable_prefix_caching": (None, False),
    }
    argv = [
        word
        for option, (text, _) in given.items()
        for word in (ENGINE_FLAGS[option], text)
        if word is not None
    ]
    parse = setup_arg_parser("x").parse_args
    assert engine_options(parse(argv)) == {name: value for name, (_, value) in given.items()}
    assert engine_options(parse(["--no-run-ahead"]))["run_ahead"] is False
    assert engine_options(parse(["--wired-limit", "recommended"]))["wired_limit"] == "recommended"
    assert engine_options(parse(["--prefill-step-size", "77"]))["max_num_batched_tokens"] == 77


def test_the_flags_of_the_server_make_its_settings(tmp_path: Path):
    keys = tmp_path / "keys"
    keys.write_text("bob two\n")
    keys.chmod(0o600)
    argv = ["--host", "0.0.0.0", "--port", "0", "--api-key", "alice one", "--api-key-file"]
    argv += [str(keys), "--allowed-host", "Mac.example", "--allowed-host", "[::1]"]
    argv += ["--cors-origin", "http://localhost:3000", "--cors-origin", "*", "--share-cache"]
    argv += ["--allow-cache-texts"]
    argv += ["--max-queue-len", "0", "--max-body-bytes", "1M", "--drain-seconds", "1.5"]
    argv += ["--step-timeout", "60"]
    argv += ["--log-prompts", "--log-cache", "--log-level", "DEBUG"]
    assert read_settings(setup_arg_parser("x").parse_args(argv)) == ServerSettings(
        host="0.0.0.0",
        port=0,
        api_keys=(ApiKey("alice", "one"), ApiKey("bob", "two")),
        allowed_hosts=("mac.example", "[::1]"),
        cors_origins=("http://localhost:3000", "*"),
        share_cache=True,
        allow_cache_texts=True,
        max_queue_len=0,
        max_body_bytes=2**20,
        drain_seconds=1.5,
        step_timeout=60.0,
        log_prompts=True,
        log_cache=True,
        log_level="debug",
    )
    assert read_settings(setup_arg_parser("x").parse_args([])) == ServerSettings()


def test_variables_of_the_template_come_from_two_flags():
    def options(*argv: str) -> dict[str, object]:
        return template_options(setup_arg_parser("x").parse_args(list(argv)))

    assert options() == {}
    assert options("--no-thinking") == {"enable_thinking": False}
    given = ["--chat-template-args", '{"enable_thinking": false, "today": "Monday"}']
    assert options(*given, "--no-thinking") == options(*given)
    assert options(*given)["today"] == "Monday"


def test_the_help_names_every_flag_and_no_mlx_is_imported(capsys: pytest.CaptureFixture):
    assert program.main(["--help"], "mlx-paged serve") == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: mlx-paged serve ")
    for flag in ENGINE_FLAGS.values():
        assert flag in text
    assert program.main(["--version"]) == 0


# Mistakes


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--port", "65536"], "argument --port: must be a whole number within 0..65535"),
        (["--port", "http"], "argument --port: must be a whole number"),
        (["--max-queue-len", "-1"], "argument --max-queue-len: must be a whole number, at least 0"),
        (["--wired-limit", "all"], "argument --wired-limit: must be 'recommended' or bytes"),
        (["--max-body-bytes", "3blocks"], "argument --max-body-bytes: must be bytes"),
        (["--max-body-bytes", "0"], "argument --max-body-bytes: must be bytes"),
        (["--drain-seconds", "nan"], "argument --drain-seconds: must be a number, at least 0"),
        (["--step-timeout", "-1"], "argument --step-timeout: must be a number, at least 0"),
        (["--drain-seconds", "-1"], "argument --drain-seconds: must be a number, at least 0"),
        (["--log-level", "loud"], "argument --log-level: invalid choice: 'loud'"),
        (["--cors-origin", "localhost"], "argument --cors-origin: must be * or an origin"),
        (["--cors-origin", "http://a/"], "argument --cors-origin: must be * or an origin"),
        (["--cors-origin", "http://["], "argument --cors-origin: must be * or an origin"),
        (["--allowed-host", "a:80"], "argument --allowed-host: must be a name or an address"),
        (["--chat-template-args", "[1]"], "argument --chat-template-args: must be a JSON object"),
        (["--chat-template-args", "{"], "argument --chat-template-args: must be a JSON object"),
        (["--watermark", "1"], "argument --watermark: must be within 0..1, below 1, got '1'"),
        (["--swap-bytes", "x"], "argument --swap-bytes: must be bytes"),
        (["--max-num-seqs", "0"], "argument --max-num-seqs: must be a whole number, at least 1"),
        (["--temp", "-1"], "argument --temp: must be a number, at least 0, got '-1'"),
        (["--served-model-name"], "argument --served-model-name: expected at least one argument"),
        (["--run-ahead=--"], "argument --run-ahead: the value can't be '--'"),
        (["--api-key", "a b c"], "[server] --api-key: key 1 must be 1 to 512 ASCII characters"),
        (["--api-key", "b", "--api-key", "b"], "[server] --api-key: key 2 is given twice"),
        (
            ["--api-key-file", "/nothing"],
            "[server] --api-key-file '/nothing' can't be read: No such",
        ),
        (
            ["--tensor-parallel-size", "2"],
            "--tensor-parallel-size; each machine has one GPU; mlx.launch",
        ),
        (
            ["--temperature", "1"],
            "--temperature; use --temp (see --help)",
        ),
        (["--enforce-eager"], "--enforce-eager; a decode is replayed from a trace"),
        (["--gpu-memory-utilization=.9"], "utilization=.9; use --kv-cache-bytes (see --help)"),
        (["--allowed-origins", "*"], "use --cors-origin (see --help)"),
        (["--ctx-size", "4096"], "use --max-model-len (see --help)"),
        (["a", "b"], "unrecognized arguments: b (see --help)"),
        (["a", "--model", "b"], "the model is given twice, as --model and as 'a'"),
        (["/nothing/here"], "no folder '/nothing/here'"),
        (["--modle", "x\ny", "z\nz"], "unrecognized arguments: --modle z z (see --help)"),
        (["--api-key", "k", "--allow-unauthenticated"], "give either it or keys"),
        (["--host", "192.0.2.1"], "[server] can't listen on host '192.0.2.1': "),
        (["--host", "a" * 300], "is unknown: "),
        (
            ["--host", "0.0.0.0"],
            "other machines can reach 0.0.0.0, and there is no key; give --api-key",
        ),
        (["--host", ""], "other machines can reach every address, and there is no key"),
        (["--model", "/nothing"], "/nothing"),
        (["--model", "/nothing.gguf"], "[load] no file '/nothing.gguf'"),
        (["--tokenizer", "/nothing"], "[load] no folder '/nothing'"),
        (["--dtype", "float16"], "[load] --dtype is for GGUF files"),
        (["--draft-model", "/nothing"], "[load] --draft-model: no folder"),
        (["--adapter-path", "/nothing"], "adapters in /nothing can't be used"),
        (["--chat-template", "/nothing"], "[server] --chat-template '/nothing' can't be read"),
        (
            ["--no-thinking", "--chat-template-args", '{"enable_thinking": true}'],
            "[server] --chat-template-args sets enable_thinking to True, but --no-thinking sets it",
        ),
        (
            ["--max-num-seqs", "100", "--max-num-batched-tokens", "50"],
            "[scheduler] --max-num-batched-tokens 50 must be at least --max-num-seqs 100",
        ),
        (["--kv", "basic", "--kv-bits", "8"], "--kv-bits"),
        (["--kv-cache-bytes", "1"], "--kv-cache-bytes"),
        (["--cache-dir-size", "1G"], "[engine] --cache-dir-size 1073741824 is of no use without"),
        (["--cache-dir", "/kv", "--cache-dir-size", "1"], "[engine] --cache-dir-size of 1 bytes"),
        (["--cache-dir", "/kv", "--cache-dir-size", "0"], "argument --cache-dir-size: must be byt"),
        (["--cache-dir", "/kv", "--cache-dir-ttl", "x"], "argument --cache-dir-ttl: must be secon"),
        (["--cache-dir", "/kv", "--kv", "basic"], "[engine] --cache-dir needs blocks, which kv="),
        (
            ["--cache-dir", "/kv", "--no-enable-prefix-caching"],
            "[engine] --cache-dir needs the prefix cache",
        ),
        (["--kv", "basic", "--swap-bytes", "1G"], "[engine] --swap-bytes='1G' needs kv='paged'"),
        (["--max-model-len", "1000000"], "--max-model-len"),
        (["--num-sink-tokens", "4"], "--num-sink-tokens"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_flag(fails, argv: list[str], message: str):
    port = [] if "--port" in argv else ["--port", "0"]
    assert message in fails(*port, *argv)


def test_a_port_in_use_is_known_before_anything_is_loaded(fails, loading_raises):
    loading_raises(AssertionError("a model was loaded"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for host in ("127.0.0.1", "localhost"):
            assert fails("--host", host, "--port", str(port)) == (
                f"[server] port {port} is in use on {host}; choose another with --port, or 0 for a "
                "free one"
            )


def test_a_port_without_permission_is_named(fails, monkeypatch):
    def bind(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("mlx_paged.server.http.http_server._listen", bind)
    assert fails("--port", "80") == (
        "[server] there is no permission to listen on port 80; choose another with --port"
    )


def test_a_server_without_what_it_is_made_of_says_how_to_get_it(fails, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.setattr(
        program.importlib.util, "find_spec", lambda name: None if name == "uvicorn" else name
    )
    assert fails() == ("the server needs uvicorn; install it with pip install 'mlx-paged[server]'")


@pytest.mark.parametrize(
    ("argv", "is_refused"),
    [
        (["--host", "0.0.0.0"], True),
        (["--host", "0.0.0.0", "--api-key", "k"], False),
        (["--host", "0.0.0.0", "--allow-unauthenticated"], False),
        (["--host", "127.0.0.9"], False),
        (["--host", "localhost"], False),
    ],
)
def test_only_a_key_or_a_word_by_name_opens_the_server_to_others(
    argv: list[str], is_refused: bool, loading_raises: Callable[[BaseException], None]
):
    loading_raises(InterruptedError("it is bound"))
    if is_refused:
        assert program.main(["--port", "0", *argv]) == 2
    else:
        with pytest.raises(InterruptedError, match="it is bound"):
            program.main(["--port", "0", *argv])


def test_keys_with_equals_signs_are_said_to_have_no_name(loading_raises, capsys):
    loading_raises(ValueError("no model"))
    for texts, line in [
        (["alice=sesame", "plain"], "[1 of the keys contains a =, which is part of the key; "),
        (["alice=sesame", "b=c"], "[2 of the keys contain a =, which is part of the key; "),
        (["Zm9vYg==", "alice sesame=x"], "[loading"),
    ]:
        keys = [word for text in texts for word in ("--api-key", text)]
        assert program.main(["--port", "0", *keys]) == 2
        said = capsys.readouterr().err
        assert said.startswith(line)
        assert "sesame" not in said and "alice" not in said


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["a"], "1 key"),
        (["alice a", "b"], "2 keys"),
        (["alice a", "alice b"], "2 keys of 1 user"),
        (["alice a", "alice b", "c"], "3 keys of 2 users"),
    ],
)
def test_the_announcement_counts_keys_and_users(texts: list[str], words: str):
    assert in_words(read_api_keys(texts)) == words


def test_an_interrupt_while_the_model_is_loaded_ends_quietly(loading_raises, capsys):
    loading_raises(KeyboardInterrupt())
    assert program.main(["--port", "0"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_clients_call_a_model_by_the_last_part_of_its_path(tmp_path: Path):
    (tmp_path / "Qwen3-0.6B-4bit").mkdir()
    names = [
        program.name_of(model)
        for model in (None, "mlx-community/Qwen3-0.6B-4bit", f"{tmp_path}/Qwen3-0.6B-4bit/")
    ]
    assert names == ["demo", "mlx-community/Qwen3-0.6B-4bit", "Qwen3-0.6B-4bit"]


def test_the_names_of_other_servers_flags_lead_to_flags():
    flags = {name for action in setup_arg_parser("x")._actions for name in action.option_strings}
    assert set(program._OTHER_FLAGS.values()) <= flags
    assert set(program.FLAGS.values()) <= flags
