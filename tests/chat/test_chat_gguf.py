"""The chat with a GGUF file."""

from __future__ import annotations

import pytest
from helpers.gguf_files import write_demo

from mlx_paged import demo_model_path

QUESTION = ("Repeat: warm tapole", "--max-tokens", "6")


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    return str(write_demo(tmp_path_factory.mktemp("gguf") / "demo.gguf"))


def test_a_file_answers_as_its_folder_does(run_chat, demo):
    assert run_chat(*QUESTION)[:2] == run_chat("--model", demo, *QUESTION)[:2]


def test_a_tokenizer_and_a_dtype_may_be_given(run_chat, refused, demo, tmp_path):
    status, out, _ = run_chat(
        "--model", demo, "--tokenizer", str(demo_model_path()), "--dtype", "bfloat16", *QUESTION
    )
    assert status == 0
    assert out.strip()
    file = str(write_demo(tmp_path / "x.gguf", **{"tokenizer.ggml.model": "t5"}))
    error = refused("--model", file, *QUESTION)
    assert error.endswith("give a folder with the model's tokenizer as --tokenizer")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model", "/no/such.gguf"], "[load] no file '/no/such.gguf'"),
        (["--dtype", "float16"], "[load] --dtype is for GGUF files; "),
        (["--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
        (["--tokenizer", "nowhere"], "no folder 'nowhere'"),
        (["--tokenizer", __file__], "is a file; --tokenizer is the folder of a tokenizer"),
    ],
)
def test_a_mistake_is_one_clear_line(refused, argv, message):
    assert message in refused(*argv, *QUESTION)


def test_a_damaged_file_is_one_clear_line(refused, demo, tmp_path):
    path = tmp_path / "cut.gguf"
    with open(demo, "rb") as file:
        path.write_bytes(file.read(100_000))
    assert "cut.gguf is truncated or damaged" in refused("--model", str(path), *QUESTION)
