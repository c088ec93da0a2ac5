"""What folders say of embeddings and scores, and ``LLM.embed`` and ``LLM.score``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from helpers.gguf_files import write_demo
from helpers.pooling_folders import (
    MODULES,
    change_json,
    embedder_folder,
    end_texts,
    plain_folder,
    reranker_folder,
)
from mlx.nn import Module
from mlx_lm.utils import load_model

from mlx_paged import LLM, load
from mlx_paged.errors import ArgumentError, PromptTooLongError
from mlx_paged.loading import LoadError
from mlx_paged.loading.pooling import read_embedder, read_reranker

TOLERANCE = 2e-6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return embedder_folder(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, kv_cache_bytes="64M") as llm:
        yield llm


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = reranker_folder(tmp_path_factory.mktemp("models"))
    with LLM(path, kv_cache_bytes="64M") as llm:
        yield llm


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Module:
    return load_model(folder)[0]


def embedding(theirs: Any, token_ids: list[int], dimensions: int | None = None) -> np.ndarray:
    row = np.array(theirs.model(mx.array([token_ids]))[0, -1])[:dimensions]
    return row / np.linalg.norm(row)


def difference(found: list[float], expected: np.ndarray) -> float:
    assert len(found) == len(expected)
    return float(np.abs(np.array(found) - expected).max())


def test_texts_are_embedded_with_the_end_token_of_the_tokenizer(llm: LLM, theirs: Module):
    texts = ["Once upon a time", "Tom had a dog. " * 20, "a"]
    outputs = llm.embed([*texts, [5, 6, 7]])
    for text, output in zip(texts, outputs, strict=False):
        assert output.prompt_token_ids == [*llm.get_tokenizer().encode(text)]
        assert output.prompt_token_ids[-1] == 3
    assert outputs[3].prompt_token_ids == [5, 6, 7]
    for output in outputs:
        expected = embedding(theirs, output.prompt_token_ids)
        assert difference(output.outputs.embedding, expected) < TOLERANCE
        assert output.finished
    # Alone as in a batch, up to rounding.
    [alone] = llm.embed(texts[1])
    assert difference(alone.outputs.embedding, np.array(outputs[1].outputs.embedding)) < TOLERANCE


def test_dimensions_and_prompts(llm: LLM, theirs: Module):
    [output] = llm.embed("a dog", 16, prompt_name="query")
    token_ids = llm.get_tokenizer().encode("Instruct: find it\nQuery:a dog")
    assert output.prompt_token_ids == token_ids
    assert difference(output.outputs.embedding, embedding(theirs, token_ids, 16)) < TOLERANCE
    [same] = llm.embed({"prompt": "a dog"}, 16, prompt_name="query")
    assert same.prompt_token_ids == token_ids
    [plain], [document] = llm.embed("a dog"), llm.embed("a dog", prompt_name="document")
    assert plain.outputs == document.outputs
    for arguments, words in (
        ({"prompt_name": "passage"}, "no prompt 'passage'; this model has 'query', 'document'"),
        ({"dimensions": 129}, "dimensions must be at most 128, .*got 129"),
        ({"dimensions": True}, "dimensions must be a whole number"),
        ({"batch_size": 3}, "batch_size"),
    ):
        with pytest.raises((ValueError, TypeError), match=words):
            llm.embed("a dog", **arguments)  # type: ignore[arg-type]


def test_prompts_that_can_not_be_embedded_are_refused(llm: LLM):
    with pytest.raises(ArgumentError, match="the prompt is empty"):
        llm.embed([[]])
    with pytest.raises(PromptTooLongError, match="may have at most 4096"):
        llm.embed([[5] * 4097])


@pytest.mark.parametrize(("kind", "words"), [(3, ""), (1, "its pooling is 'mean'")])
def test_a_gguf_file_says_how_it_pools(tmp_path: Path, kind: int, words: str):
    file = tmp_path / "tiny.gguf"
    options = {"qwen3.pooling_type": kind, "tokenizer.ggml.add_eos_token": True}
    write_demo(file, **options)
    model: Any
    model, tokenizer = load(file)
    if words:
        with pytest.raises(ArgumentError, match=words):
            read_embedder(model, tokenizer)
        return
    embedder = read_embedder(model, tokenizer)
    assert embedder.is_declared
    assert embedder.encode("a")[-1] == tokenizer.eos_token_id


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"pooling": {"pooling_mode_mean_tokens": True}}, "its pooling is 'mean'"),
        ({"pooling": {"pooling_mode": "cls"}}, "its pooling is 'cls'"),
        ({"modules": (*MODULES, "models.Dense")}, "modules.json has a 'Dense'"),
    ],
    ids=["mean", "cls", "dense"],
)
def test_other_poolings_are_refused_by_name(tmp_path: Path, arguments: dict[str, Any], words: str):
    model, tokenizer = load(embedder_folder(tmp_path, **arguments))
    with pytest.raises(ArgumentError, match=f"tiny-embedding can't give embeddings here: {words}"):
        read_embedder(model, tokenizer)  # type: ignore[arg-type]


def test_what_the_files_of_a_model_say(tmp_path: Path, folder: Path):
    model: Any
    model, tokenizer = load(folder)
    found = read_embedder(model, tokenizer)
    assert found.is_declared and found.normalizes and found.default_prompt == ""
    # A conversion for MLX has only the tokenizer.
    converted = plain_folder(tmp_path)
    model, tokenizer = load(converted)
    assert not read_embedder(model, tokenizer).is_declared
    end_texts(converted)
    model, tokenizer = load(converted)
    found = read_embedder(model, tokenizer)
    assert found.is_declared and found.normalizes and not found.prompts
    (converted / "config_sentence_transformers.json").write_text('{"prompts": ["query"]}')
    with pytest.raises(LoadError, match=r"prompts in .* must be texts by their names"):
        read_embedder(model, tokenizer)
    change_json(converted / "config.json", use_bidirectional_attention=True)
    with pytest.raises(ArgumentError, match="plain can't give embeddings here: its tokens attend"):
        read_embedder(model, tokenizer)
    change_json(converted / "config.json", model_type="bert")
    with pytest.raises(LoadError, match=r"'bert' is not supported.* it is an encoder"):
        load(converted)


def test_qwen3_embedding_ends_texts_where_its_tokenizer_does_not(tmp_path: Path, theirs: Any):
    with LLM(plain_folder(tmp_path, "Qwen3-Embedding-tiny"), kv_cache_bytes="64M") as llm:
        found = read_embedder(llm.engine.runner.model, llm.tokenizer)
        assert found.is_declared and found.ends_texts and found.end_token_ids == (3,)
        [output, tokens] = llm.embed(["a dog", [5, 6]])
        token_ids = [*llm.get_tokenizer().encode("a dog"), 3]
    assert output.prompt_token_ids == token_ids and tokens.prompt_token_ids == [5, 6]
    assert difference(output.outputs.embedding, embedding(theirs, token_ids)) < TOLERANCE


def test_without_a_normalising_module_embeddings_keep_their_length(tmp_path: Path, theirs: Any):
    with LLM(embedder_folder(tmp_path, modules=MODULES[:2]), kv_cache_bytes="64M") as llm:
        [output] = llm.embed([[5, 6, 7]])
    row = np.array(theirs.model(mx.array([[5, 6, 7]]))[0, -1])
    assert difference(output.outputs.embedding, row) < 1e-5 * np.abs(row).max()


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
def test_a_checkpoint_without_its_head_gives_embeddings(
    tmp_path: Path, theirs: Module, is_tied: bool
):
    folder = plain_folder(tmp_path)
    weights = mx.load(str(folder / "model.safetensors"))
    bare = {name.removeprefix("model."): each for name, each in weights.items()}
    assert bare.keys().isdisjoint(weights)
    mx.save_safetensors(str(folder / "model.safetensors"), bare, {"format": "pt"})
    change_json(folder / "config.json", tie_word_embeddings=is_tied)
    with LLM(folder, kv_cache_bytes="64M") as llm:
        [output] = llm.embed([[5, 6, 7]])
    assert difference(output.outputs.embedding, embedding(theirs, [5, 6, 7])) < TOLERANCE


BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def test_scores_are_the_share_of_yes_after_the_prompt_of_qwen3_reranker(reranker: LLM, theirs: Any):
    tokenizer, documents = reranker.get_tokenizer(), ["Tom had a dog.", "It was " * 90, "no"]
    outputs = reranker.score("Who had a dog?", documents, instruction="Find the owner")
    for document, output in zip(documents, outputs, strict=True):
        asked = f"<Instruct>: Find the owner\n<Query>: Who had a dog?\n<Document>: {document}"
        token_ids = [each for text in (BEFORE, asked, AFTER) for each in tokenizer.encode(text)]
        assert output.prompt_token_ids == token_ids
        no, yes = np.array(theirs(mx.array([token_ids]))[0, -1])[
            tokenizer.convert_tokens_to_ids(["no", "yes"])
        ]
        assert abs(output.outputs.score - np.exp(yes) / (np.exp(yes) + np.exp(no))) < 1e-5
    # What is before the documents is computed once, and found again by the next call.
    assert outputs[0].num_cached_tokens == 0 < outputs[1].num_cached_tokens
    [again] = reranker.score("Who had a dog?", "Ben", instruction="Find the owner")
    assert again.num_cached_tokens == outputs[1].num_cached_tokens
    [pair, _] = reranker.score(["Who had a dog?", "b"], ["Ben", "c"], instruction="Find the owner")
    assert pair.prompt_token_ids == again.prompt_token_ids
    assert pair.outputs.score == pytest.approx(again.outputs.score, abs=1e-6)
    for arguments in ((["a", "b"], ["c"]), ("a", [5]), (3, "b")):
        with pytest.raises(ArgumentError, match=r"queries|documents"):
            reranker.score(*arguments)  # type: ignore[arg-type]


def test_only_qwen3_reranker_gives_scores(tmp_path: Path, llm: LLM, reranker: LLM):
    with pytest.raises(ArgumentError, match=r"tiny-embedding gives no scores: .* Qwen3-Reranker"):
        llm.score("a", "b")
    path = reranker_folder(tmp_path, "renamed")
    model: Any
    model, tokenizer = load(path)
    with pytest.raises(ArgumentError, match="renamed gives no scores"):
        read_reranker(model, tokenizer)
    known = read_reranker(model, tokenizer, is_declared=True).token_ids
    (path / "1_LogitScore").mkdir()
    score = path / "1_LogitScore" / "config.json"
    score.write_text(f'{{"true_token_id": {known[1]}, "false_token_id": {known[0]}}}')
    assert read_reranker(model, tokenizer).token_ids == known
    score.write_text(f'{{"true_token_id": {known[1]}, "false_token_id": null}}')
    with pytest.raises(ArgumentError, match="renamed gives no scores"):
        read_reranker(model, tokenizer)
    change_json(path / "config.json", classifier_from_token=["no", "yes"])
    assert read_reranker(model, tokenizer).token_ids == known
    with pytest.raises(ValueError, match="task must be"):
        LLM(path, task="rerank")  # type: ignore[arg-type]
