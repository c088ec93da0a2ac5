"""The chat program: flags and what stands on standard input. One clear line, status 0, 1 or 2, and
no traceback.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import random
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

from fuzz_folders import right_folder, working_folder
from fuzzing import Case, Defect

# Real processes, of these cases: they take as long as Python and MLX take to start.
SHARE_OF_PROCESSES = 0.03
PROCESS_TIMEOUT = 60.0  # seconds

TEXTS = (
    "", " ", "x", "-", "--", "-1", "0", "1", "2", "-0", "3.5", "nan", "inf", "-inf", "1e400",
    "1e-400", "10**9", "0x10", "99999999999999999999", "1_000", "\u0663", "é", "\x00x", "a\nb",
    "auto", "none", "default", "--help", "-h", "@x", "/etc", "../x", "owner/no model", "512M",
    "0blocks", "3blocks", "1blocks", "9T", "-2G", "x" * 3000, "\x1b[31m", "\udcff",
)  # fmt: skip
LINES = (
    b"", b"\n", b"hi\n", b"hi", b"/help\n", b"/HELP\n", b"/fork\n", b"/back\n", b"/reset\n",
    b"/stats\n", b"/exit\n", b"/nothing\n", b"/set temp 0.7\n", b"/set temp x\n", b"/set\n",
    b"/system\n", b"/system be short\n", b"/regenerate\n", b"/edit\n", b"/edit x\n", b"/save\n",
    b"/load\n", b"/load /nothing/there\n", b"/save /\n", b"/save!\n", b"/set max-tokens 0\n",
    b"/set nothing 1\n", b"/ \n", b"//\n", b"\xff\xfe\n", b"\x00\n", b"\r\n", b"a" * 4000 + b"\n",
    b"\xf0\x9f\x98\x80\n", b"\x1b[200~a\nb\x1b[201~\n", b"\x04", b"\xed\xa0\x80\n", b"<think>\n",
    b"/fork x y\n",
)  # fmt: skip


@cache
def flags() -> list[tuple[str, bool]]:
    """The program's flags, and whether each takes a value."""
    parser = importlib.import_module("mlx_paged.chat").setup_arg_parser()
    known = [
        (flag, action.nargs != 0) for action in parser._actions for flag in action.option_strings
    ]
    return [*known, ("--no-such-flag", False), ("--mode", True)]


def chat_case(rng: random.Random) -> Case:
    argv = ["--model", str(right_folder())]
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        flag, takes_value = rng.choice(flags())
        value = _value(rng, flag)
        argv += rng.choice(([flag, value], [f"{flag}={value}"])) if takes_value else [flag]
    if rng.random() < 0.5:
        argv.insert(rng.randrange(len(argv) + 1), rng.choice((*TEXTS, "Hello", "Hello", "-")))
    if rng.random() < 0.05:
        argv = argv[: rng.randrange(len(argv) + 1)]
    stdin = b"".join(rng.choice(LINES) for _ in range(rng.choice((0, 1, 2, 5))))
    is_process = rng.random() < SHARE_OF_PROCESSES
    run = _run_process if is_process else _run_here
    shown = argv[2:] if argv[:1] == ["--model"] else argv
    title = f"chat {shown} < {stdin[:200]!r} {'in a process' * is_process}"
    return Case(ascii(title)[:700], lambda: _check(*run(argv, stdin)))


def _value(rng: random.Random, flag: str) -> str:
    """Often one that is right, so that what comes behind it is met, too."""
    right = {
        "--kv": "basic", "--max-tokens": "3", "-m": "3", "--temp": "0.7", "--top-p": "0.9",
        "--top-k": "5", "--min-p": "0.1", "--xtc-probability": "0.5", "--xtc-threshold": "0.1",
        "--seed": "3", "--block-size": "16",
        "--kv-cache-bytes": "9blocks", "--system-prompt": "Hi", "--prefill-step-size": "7",
        "--backend": "reference", "--max-model-len": "40", "--model": str(right_folder()),
    }.get(flag)  # fmt: skip
    return right if right is not None and rng.random() < 0.5 else rng.choice(TEXTS)


def _check(status: int, stdout: str, stderr: str) -> None:
    if status not in (0, 1, 2):
        raise Defect(f"the exit status is {status}: {stderr[-300:]!r}")
    if "Traceback" in stderr or "Traceback" in stdout:
        raise Defect(f"a traceback: {stderr[-1500:]}")
    # The last line is the error; before it may stand what was said while the program worked.
    lines = [line for line in stderr.splitlines() if line.strip()]
    if status and not lines:
        raise Defect(f"status {status}, and nothing on stderr")
    if status == 2 and "error" not in lines[-1].lower():
        raise Defect(f"status 2, and the last line is no error: {lines[-1]!r}")
    if status and len(lines[-1]) > 4500:
        raise Defect(f"the error line has {len(lines[-1])} characters")


def _run_process(argv: list[str], stdin: bytes) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "mlx_paged.chat", *argv]
    try:
        done = subprocess.run(
            command,
            input=stdin,
            capture_output=True,
            timeout=PROCESS_TIMEOUT,
            check=False,
            cwd=working_folder(),
        )
    except subprocess.TimeoutExpired as error:
        raise Defect(f"it was not done after {PROCESS_TIMEOUT} s") from error
    except (ValueError, OSError, UnicodeError):  # no operating system passes on such arguments
        return 0, "", ""
    return (
        done.returncode,
        done.stdout.decode(errors="replace"),
        done.stderr.decode(errors="replace"),
    )


def _run_here(argv: list[str], stdin: bytes) -> tuple[int, str, str]:
    main = importlib.import_module("mlx_paged.chat").main
    with contextlib.chdir(working_folder()), _streams(stdin) as (stdout, stderr):
        try:
            status = main(argv)
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1 if end.code else 0
    return (
        status or 0,
        stdout.getvalue().decode(errors="replace"),
        stderr.getvalue().decode(errors="replace"),
    )


@contextlib.contextmanager
def _streams(stdin: bytes) -> Iterator[tuple[io.BytesIO, io.BytesIO]]:
    """Streams as a process has them in a pipe, with Python's encodings and errors."""
    stdout, stderr = io.BytesIO(), io.BytesIO()
    replaced: dict[str, Any] = {
        "stdin": io.TextIOWrapper(io.BytesIO(stdin), "utf-8", "surrogateescape"),
        "stdout": io.TextIOWrapper(stdout, "utf-8", "surrogateescape", write_through=True),
        "stderr": io.TextIOWrapper(stderr, "utf-8", "backslashreplace", write_through=True),
    }
    before = {name: getattr(sys, name) for name in replaced}
    for name, stream in replaced.items():
        setattr(sys, name, stream)
    try:
        yield stdout, stderr
    finally:
        for name, stream in before.items():
            setattr(sys, name, stream)
        for stream in (replaced["stdout"], replaced["stderr"]):
            stream.flush()
            stream.detach()
