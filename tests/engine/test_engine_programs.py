"""Programs that use engines end well: after Ctrl-C, with threads, and in forked children."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.disk_tiers import block_files

from mlx_paged.errors import STUCK_STATUS

pytestmark = pytest.mark.slow


def run_program(text: str, *arguments: str) -> tuple[int, str, str]:
    """The exit status of a program, and what it has printed."""
    command = [sys.executable, "-c", text, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    return done.returncode, done.stdout, done.stderr


# The end of Python comes while the thread clears its streams.
ENDS_MEANWHILE = """
import time
import mlx.core as mx
from mlx_paged.engine import thread

class SlowMLX:
    def clear_streams(self):
        is_clearing.append(True)
        time.sleep(0.2)
        mx.clear_streams()
        print("cleared", flush=True)

is_clearing, thread.mx = [], SlowMLX()
engine_thread = thread.EngineThread()
engine_thread.call(lambda: mx.eval(mx.ones((1000,)) + 1))
engine_thread.end()
while not is_clearing:
    time.sleep(0.001)
"""


def test_python_does_not_end_before_a_thread_has_cleared_its_streams():
    assert run_program(ENDS_MEANWHILE) == (0, "cleared\n", "")


# MLX keeps the state of ``mx.random`` for a thread, and needs the GIL to free it when the thread
# ends, which is after ``join`` has returned. Here this takes a while, as does the end of Python.
ENDS_LATE = """
import ctypes, sys, threading, time
from mlx_paged import LLM, SamplingParams

class EndsLate:
    def __del__(self, sleep=time.sleep):
        for _ in range(10):
            sleep(0.1)

def use():
    llm = LLM("demo")
    params = SamplingParams(max_tokens=2, logits_processors=[lambda tokens, logits: logits])
    llm.generate("Hello", params)
    libc = ctypes.CDLL(None)
    usleep = ctypes.cast(libc.usleep, ctypes.c_void_p)
    libc.__cxa_thread_atexit_impl(usleep, ctypes.c_void_p(300_000), None)

sys.ends_late = EndsLate()
thread = threading.Thread(target=use)
thread.start()
thread.join()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux unwinds a thread without the GIL")
def test_python_does_not_end_before_the_threads_in_which_an_llm_was_used():
    assert run_program(ENDS_LATE) == (0, "", "")


FORKS = """
import os, sys, time
from mlx_paged import LLM, AsyncEngine, Engine, SamplingParams, demo_model_path, generate, load
from mlx_paged.engine.thread import ForkedError

model, tokenizer = load(demo_model_path())
params = SamplingParams(max_tokens=2)
cache_dir = sys.argv[1]
llm, engine = LLM(model, tokenizer), Engine(model, tokenizer, cache_dir=cache_dir)
expected = llm.generate("Hello", params)[0].outputs[0].text
assert generate(model, tokenizer, "Hello", max_tokens=2).strip() == expected.strip()
several = AsyncEngine(model, tokenizer)
stream = several.stream("Hello", params)
while several.engine.has_unfinished_requests():
    time.sleep(0.01)  # Another thread may hold a lock of MLX's only in the middle of a step.
engine.add_request("a", "Hello", params)
calls = dict(
    generate=lambda: llm.generate("Hello", params),
    chat=lambda: llm.chat([{"role": "user", "content": "Hello"}], params),
    add_request=lambda: engine.add_request("b", "Hello", params),
    step=engine.step,
    abort=lambda: engine.abort("a"),
    abort_all=engine.abort_all,
    shrink=engine.shrink,
    reset_prefix_cache=engine.reset_prefix_cache,
    save_more=engine.save_more,
    save_snapshot=lambda: engine.save_snapshot("nothing", [1, 2, 3]),
    cached_block_ids=lambda: engine.cached_block_ids([1, 2, 3]),
    close=engine.close,
    stream=lambda: several.stream("Hello", params),
    next_of_stream=lambda: next(stream),
    abort_stream=several.abort_all,
)
if pid := os.fork():
    assert os.waitpid(pid, 0)[1] == 0
    assert llm.generate("Hello", params)[0].outputs[0].text == expected
    stream.close()
    several.shutdown()
    assert engine.close()
else:
    said = set()
    for name, call in calls.items():
        try:
            call()
            print(name, "returned")
        except ForkedError as error:
            said.add(str(error))
    # Their ends have nothing to do here.
    stream.close()
    several.shutdown()
    engine.drop(["a"])
    print(*said)
    print(generate(model, tokenizer, "Hello", max_tokens=2).strip() == expected.strip())
"""


def test_in_a_forked_child_every_call_of_an_engine_raises_and_one_shot_calls_work(tmp_path: Path):
    told = (
        "[engine] it was made before this process was forked, and does not run here; make another "
        "one in this process"
    )
    assert run_program(FORKS, str(tmp_path)) == (0, f"{told}\nTrue\n", "")


# Ctrl-C ends the call, and another one the end of Python, which waits for the step.
LOOPS = """
import os, signal, sys, threading, time
from mlx_paged import LLM, SamplingParams
has_begun = threading.Event()
def loops(tokens, logits):
    has_begun.set()
    {loop}
def send():
    has_begun.wait()
    for _ in range(2):
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=send, daemon=True).start()
llm = LLM("demo", cache_dir=sys.argv[1])
llm.generate([[5] * 200], SamplingParams(max_tokens=1))
llm.generate("Hello", SamplingParams(max_tokens=3, logits_processors=[loops]))
"""


@pytest.mark.parametrize(
    ("loop", "status"), [("while True: pass", -signal.SIGINT), ("time.sleep(600)", STUCK_STATUS)]
)
def test_a_second_ctrl_c_at_the_end_of_python_aborts_no_process(
    tmp_path: Path, loop: str, status: int
):
    program = LOOPS.format(loop=loop)
    ended, _, said = run_program(program, str(tmp_path))
    assert ended == status and said.rstrip().endswith("KeyboardInterrupt"), said
    # What was computed before is written.
    assert len(block_files(tmp_path)) == 12
