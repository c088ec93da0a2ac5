"""The chat, the server and scripts on two ranks: rank 0 hears the user, the other one is silent."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from helpers.ranks import REPOSITORY, ends, free_ports, started

from mlx_paged import LLM, SamplingParams, demo_model_path

QUESTION = "My cat is called Tom. What is my cat called?"

SCRIPT = """
import json
from mlx_paged import (
    LLM, SamplingParams, StructuredOutputsParams, batch_generate, demo_model_path, stream_generate
)

llm = LLM(demo_model_path(), kv_cache_bytes="400blocks")
asked = [{"role": "user", "content": "My cat is called Tom. What is my cat called?"}]
params = SamplingParams(max_tokens=20, n=2, temperature=0.5, seed=3, logprobs=1, stop=["z"])
for outputs in (llm.chat(asked, params), llm.generate(["Hello", 5], raise_on_error=False)):
    print(json.dumps([
        [output.error and str(output.error), [[c.text, c.token_ids, c.finish_reason, c.logprobs
         and list(c.logprobs[0])] for c in output.outputs]] for output in outputs]))
try:
    llm.generate(["Hello"], [None, None])
except ValueError as error:
    print(error)
model, tokenizer = llm.engine.model, llm.engine.tokenizer
for number, response in enumerate(stream_generate(model, tokenizer, "Hello", 20)):
    print(response.text)
    if number == 3:
        break
print(batch_generate(model, tokenizer, ["Hello", "The cat"], max_tokens=5).texts)
try:
    stream_generate(model, tokenizer, [0] * 5000)
except RuntimeError as error:
    print(error)
choice = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["Tom", "Tim"]))
print(llm.chat(asked, choice)[0].outputs[0].text)
# Rounded, because the sums of ranks round otherwise than those of one process.
[output] = llm.embed(["The cat"], 4)
print([round(each, 3) for each in output.outputs.embedding])
stats = llm.stats()
print(json.dumps([stats.num_steps, stats.num_generation_tokens]))
# Without a seed: alike on all ranks, and on nobody else.
print(llm.generate("Hello", SamplingParams(temperature=1.5))[0].outputs[0].token_ids)
"""


@pytest.mark.slow
def test_a_script_that_every_rank_runs_gets_the_same_outputs_everywhere(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    alone = io.StringIO()
    with contextlib.redirect_stdout(alone):
        exec(SCRIPT, {})
    with started(2, [str(script)], tmp_path) as processes:
        ended = ends(processes)
    assert [(each.status, each.err) for each in ended] == [(0, "")] * 2
    assert ended[0].out == ended[1].out
    assert ended[0].out.splitlines()[:-1] == alone.getvalue().splitlines()[:-1]
    assert alone.getvalue().count("\n") == 13


def ask(url: str, question: str) -> str:
    body = {
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": 30,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        content: str = json.loads(answer.read())["choices"][0]["message"]["content"]
        return content


def answer_of_one_process(question: str) -> str:
    llm = LLM(demo_model_path(), kv_cache_bytes="400blocks")
    [output] = llm.chat([{"role": "user", "content": question}], SamplingParams(max_tokens=30))
    return output.outputs[0].text


@pytest.mark.slow
def test_a_server_on_two_ranks_answers_and_a_signal_to_rank_0_ends_both(tmp_path: Path):
    arguments = ["-m", "mlx_paged.server", "--port", "0", "--kv-cache-bytes", "400blocks"]
    with started(2, arguments, tmp_path) as processes:
        first, _ = processes
        assert first.stderr is not None
        said = ""
        while not (found := re.search(r"listening on (http://\S+);", said)):
            line = first.stderr.readline()
            assert line, said
            said += line
        answers = {ask(found[1], QUESTION) for _ in range(2)}
        assert answers == {answer_of_one_process(QUESTION)}
        first.send_signal(signal.SIGTERM)
        ended = ends(processes, 30)
    assert [each.status for each in ended] == [0, 0]
    assert (ended[1].out, ended[1].err) == ("", "")


@pytest.mark.slow
def test_the_launcher_of_mlx_runs_a_dialogue_on_two_ranks(tmp_path: Path):
    """Its standard input goes to all ranks, and never ends: a dialogue leaves by itself."""
    port = free_ports(1)[0]
    chat = ["-m", "mlx_paged.chat", "--kv-cache-bytes", "400blocks"]
    command = [
        str(Path(sys.executable).with_name("mlx.launch")),
        *["-n", "2", "--backend", "ring", "--starting-port", str(port)],
        *["--env", f"PYTHONPATH={REPOSITORY}", "--", sys.executable, *chat],
    ]
    launched = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = launched.communicate(f"{QUESTION}\n/reset\n{QUESTION}\n/exit\n", timeout=60)
    finally:
        if launched.poll() is None:
            os.killpg(launched.pid, signal.SIGKILL)
            launched.wait()
    assert launched.returncode == 0, err
    assert out.count(answer_of_one_process(QUESTION)) == 2
    assert "[ranks]" not in err


@pytest.mark.slow
def test_a_wrong_argument_of_one_rank_ends_both(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "from mlx_paged.chat import main\n"
        "kv = ['--kv-cache-bytes', '9blocks' if os.environ['MLX_RANK'] == '0' else '8blocks']\n"
        "sys.exit(main(['Hello', *kv]))\n"
    )
    with started(2, [str(script)], tmp_path) as processes:
        ended = ends(processes, 60)
    line = (
        "error: the setting kv_cache_bytes is '9blocks' on rank 0 and '8blocks' on rank 1; it must "
        "be the same on all ranks"
    )
    for each in ended:
        assert each.status == 2
        assert each.out == ""
        assert line in each.err.replace("[ranks] ", ""), each.err
        assert "Traceback" not in each.err
