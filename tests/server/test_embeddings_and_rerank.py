"""``/v1/embeddings``, ``/v1/rerank`` and ``/v1/score``."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import openai
import pytest
from helpers.pooling_folders import embedder_folder, plain_folder, reranker_folder
from helpers.servers import ask, client_of, is_idle, make_service, serving, wait_until

from mlx_paged.server.app import App
from mlx_paged.server.http.limits import QueueLimit
from mlx_paged.server.pooling import MAX_INPUTS, PoolingFields, read_inputs
from mlx_paged.server.prompt_threads import Work
from mlx_paged.server.routes import RequestContext
from mlx_paged.server.service import Service
from mlx_paged.server.settings import ApiKey, ServerSettings

TOLERANCE = 2e-6


class Running(NamedTuple):
    service: Service
    url: str

    def post(self, path: str, **body: Any) -> tuple[int, Any]:
        answer = ask(self.url, path, body)
        return answer.status, answer.body

    def embed(self, inputs: Any, **body: Any) -> list[np.ndarray]:
        status, answer = self.post("/v1/embeddings", input=inputs, **body)
        assert status == 200, answer
        return [np.array(each["embedding"]) for each in answer["data"]]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = embedder_folder(tmp_path_factory.mktemp("models"))
    service = make_service(folder, model_names=("embedder",), max_num_seqs=4)
    with service.engine, serving(App(service)) as url:
        yield Running(service, url)
        wait_until(lambda: is_idle(service))


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = reranker_folder(tmp_path_factory.mktemp("models"))
    service = make_service(folder, model_names=("reranker",))
    with service.engine, serving(App(service)) as url:
        yield Running(service, url)
        wait_until(lambda: is_idle(service))


def test_openais_client_gets_embeddings_with_either_encoding(embedder: Running):
    texts = ["Once upon a time", "Tom had a dog.", "a" * 300]
    with openai.OpenAI(base_url=f"{embedder.url}/v1", api_key="none", max_retries=0) as client:
        # By default it asks for base64.
        answer = client.embeddings.create(model="embedder", input=texts)
        floats = client.embeddings.create(
            model="embedder", input=texts, encoding_format="float", dimensions=16, user="me"
        )
        one = client.embeddings.create(model="embedder", input=texts[1])
        tokens = embedder.service.tokenizer.encode(texts[1])
        of_tokens = client.embeddings.create(model="embedder", input=[tokens, tokens])
    assert [each.index for each in answer.data] == [0, 1, 2]
    num_tokens = sum(len(embedder.service.tokenizer.encode(text)) for text in texts)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == num_tokens
    assert answer.model == "embedder" and answer.object == "list"
    for whole, cut in zip(answer.data, floats.data, strict=True):
        embedding = np.array(whole.embedding)
        assert embedding.shape == (128,) and abs(np.linalg.norm(embedding) - 1) < 1e-6
        expected = embedding[:16] / np.linalg.norm(embedding[:16])
        assert np.abs(np.array(cut.embedding) - expected).max() < TOLERANCE
    for each in (*one.data, *of_tokens.data):
        assert np.abs(np.array(each.embedding) - answer.data[1].embedding).max() < TOLERANCE


def test_ollamas_paths_give_the_same_embeddings(embedder: Running):
    texts = ["Once upon a time", "Tom had a dog."]
    status, answer = embedder.post("/api/embed", model="embedder:latest", input=texts)
    assert status == 200 and answer["model"] == "embedder:latest"
    [first] = embedder.embed(texts[0])
    assert np.abs(np.array(answer["embeddings"][0]) - first).max() < TOLERANCE
    num_tokens = sum(len(embedder.service.tokenizer.encode(text)) for text in texts)
    assert answer["prompt_eval_count"] == num_tokens
    assert answer["total_duration"] > answer["load_duration"] > 0
    # It would be cut otherwise.
    status, refusal = embedder.post("/api/embed", input=texts[1] * 2000, truncate=False)
    assert status == 400 and "is too long" in refusal["error"]
    _, short = embedder.post("/api/embed", input=texts[0], dimensions=16, keep_alive="5m")
    expected = first[:16] / np.linalg.norm(first[:16])
    assert np.abs(np.array(short["embeddings"][0]) - expected).max() < TOLERANCE
    status, older = embedder.post("/api/embeddings", prompt=texts[0], options={"num_ctx": 9})
    assert status == 200 and np.abs(np.array(older["embedding"]) - first).max() < TOLERANCE
    # Nothing is asked where only the model is to be loaded.
    for path, body, name in (
        ("/api/embed", {"input": ""}, "embeddings"),
        ("/api/embed", {"input": []}, "embeddings"),
        ("/api/embeddings", {}, "embedding"),
    ):
        status, answer = embedder.post(path, **body)
        assert (status, answer[name]) == (200, [])
    _, shown = embedder.post("/api/show", model="embedder")
    assert shown["capabilities"] == ["embedding"]
    assert shown["model_info"]["qwen3.embedding_length"] == 128


def test_more_inputs_than_may_run_at_once_beside_a_chat(embedder: Running):
    service = embedder.service
    expected = embedder.embed([f"number {n}" for n in range(50)])
    chat = {"prompt": "Once upon a time", "max_tokens": 30, "temperature": 0}
    _, alone = embedder.post("/v1/completions", **chat)
    answers: list[Any] = []
    thread = threading.Thread(
        target=lambda: answers.append(embedder.post("/v1/completions", **chat))
    )
    thread.start()
    found = embedder.embed([f"number {n}" for n in range(50)])
    thread.join()
    assert answers[0][1]["choices"][0]["text"] == alone["choices"][0]["text"]
    assert max(np.abs(one - two).max() for one, two in zip(found, expected, strict=True)) < 1e-5
    stats = service.engine.stats()
    assert stats.num_waiting == stats.num_running == stats.num_used_blocks == 0


def test_prompts_of_the_model_and_the_base64_of_float32(embedder: Running):
    [plain], [query] = embedder.embed("a dog"), embedder.embed("a dog", prompt_name="query")
    [spelt] = embedder.embed("Instruct: find it\nQuery:a dog")
    assert np.abs(query - spelt).max() < TOLERANCE < np.abs(plain - query).max()
    _, answer = embedder.post("/embeddings", input="a dog", encoding_format="base64")
    decoded = np.frombuffer(base64.b64decode(answer["data"][0]["embedding"]), "<f4")
    assert np.abs(decoded - plain).max() < TOLERANCE


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "input", "input is missing"),
        ({"input": ""}, "input", "input is empty"),
        ({"input": []}, "input", "input is empty"),
        ({"input": ["a", ""]}, "input[1]", "input[1] is empty"),
        ({"input": [[]]}, "input[0]", "input[0] is empty"),
        ({"input": ["a", 3]}, "input[1]", "input[1] must be a text or token ids, got 3"),
        ({"input": [5000]}, "input", "token id 5000"),
        ({"input": ["a"] * (MAX_INPUTS + 1)}, "input", "has 2,049 entries, but at most 2,048"),
        ({"input": ["a", [5] * 4097]}, "input[1]", "4097 tokens is too long"),
        ({"input": "a", "dimensions": 0}, "dimensions", "dimensions must be a whole number"),
        ({"input": "a", "dimensions": 129}, "dimensions", "dimensions must be at most 128"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "must be 'float' or"),
        ({"input": "a", "prompt_name": "passage"}, "prompt_name", "no prompt 'passage'"),
        ({"input": "a", "stream": True}, "stream", "stream is not supported"),
    ],
)
def test_errors_are_openais(embedder: Running, body: dict[str, Any], param: str, words: str):
    status, answer = embedder.post("/v1/embeddings", **body)
    error = answer["error"]
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert words in error["message"]
    if "too long" in words:
        assert error["code"] == "context_length_exceeded"


def test_other_models_are_refused_by_name(embedder: Running, reranker: Running):
    for running, path, body, words in (
        (reranker, "/v1/embeddings", {"input": "a"}, "reranker was not made for embeddings"),
        (embedder, "/v1/rerank", {"query": "a", "documents": ["b"]}, "gives no scores"),
        (embedder, "/v1/score", {"text_1": "a", "text_2": "b"}, "gives no scores"),
    ):
        status, answer = running.post(path, **body)
        assert status == 400 and words in answer["error"]["message"]
    status, answer = embedder.post("/v1/embeddings", model="other", input="a")
    assert status == 404 and answer["error"]["code"] == "model_not_found"


def test_a_task_makes_any_decoder_an_embedder(tmp_path):
    service = make_service(plain_folder(tmp_path))
    with service.engine:
        client = client_of(service)
        assert client.post("/v1/embeddings", json={"input": "a"}).status_code == 400
        asked = replace(service, settings=ServerSettings(task="embed"))
        answer = client_of(asked).post("/v1/embeddings", json={"input": "a"})
        assert len(answer.json()["data"][0]["embedding"]) == 128


DOCUMENTS = ["Tom had a dog.", "It was " * 30, "The cat sat."]


def test_documents_are_ranked(reranker: Running):
    body = {"query": "Who had a dog?", "documents": DOCUMENTS}
    status, answer = reranker.post("/v1/rerank", **body)
    assert status == 200
    results = answer["results"]
    scores = [each["relevance_score"] for each in results]
    assert scores == sorted(scores, reverse=True) and all(0 < each < 1 for each in scores)
    assert sorted(each["index"] for each in results) == [0, 1, 2]
    assert all(each["document"] == {"text": DOCUMENTS[each["index"]]} for each in results)
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] > 300
    # As vLLM's scores of pairs, in their order.
    _, scored = reranker.post("/v1/score", text_1=body["query"], text_2=DOCUMENTS)
    by_index = {each["index"]: each["relevance_score"] for each in results}
    for each in scored["data"]:
        assert each["score"] == pytest.approx(by_index[each["index"]], abs=1e-6)
    # As objects, without their texts, on Cohere's path, and with another instruction.
    objects = [{"text": text, "id": index} for index, text in enumerate(DOCUMENTS)]
    more = {"documents": objects, "top_n": 1, "return_documents": False}
    _, best = reranker.post("/v2/rerank", **{**body, **more})
    [result] = best["results"]
    assert result == {"index": results[0]["index"], "relevance_score": pytest.approx(scores[0])}
    _, other = reranker.post("/rerank", **body, instruction="Find cats")
    assert {each["relevance_score"] for each in other["results"]} != set(scores)


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/rerank", {"query": "a"}, "documents is missing"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents is empty"),
        (
            "/v1/rerank",
            {"query": "a", "documents": [{"title": "b"}]},
            "documents[0].text is missing",
        ),
        ("/v1/rerank", {"query": "", "documents": ["b"]}, "query is empty"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "must be at least 0"),
        ("/v1/rerank", {"query": "a", "documents": ["b", "c d " * 3000]}, "too long"),
        (
            "/v1/score",
            {"text_1": ["a", "b"], "text_2": ["c"]},
            "text_1 must be one text, or one for each of 1 doc",
        ),
    ],
)
def test_errors_of_reranking(reranker: Running, path: str, body: dict[str, Any], words: str):
    status, answer = reranker.post(path, **body)
    assert status == 400 and words in answer["error"]["message"]


def test_only_what_is_before_the_documents_stays_cached(reranker: Running):
    engine = reranker.service.engine
    body = {"query": "What is it about?", "documents": DOCUMENTS}
    reranker.post("/v1/rerank", **body)
    before = engine.stats()
    reranker.post("/v1/rerank", **{**body, "documents": ["Something else. " * 20] * 3})
    after = engine.stats()
    assert after.num_cached_blocks == before.num_cached_blocks
    assert after.num_hit_tokens > before.num_hit_tokens
    assert after.num_used_blocks == 0


def test_keys_queue_limits_metrics_and_the_log(embedder: Running, caplog: pytest.LogCaptureFixture):
    keys = (ApiKey("ann", "key-of-ann"), ApiKey("bob", "key-of-bob"))
    service = replace(embedder.service, settings=ServerSettings(api_keys=keys))
    client = client_of(service)
    body = {"input": ["a b c", "d"]}
    assert client.post("/v1/embeddings", json=body).status_code == 401
    ann = {"Authorization": "Bearer key-of-ann"}
    with caplog.at_level("INFO", "mlx_paged.server"):
        assert client.post("/v1/embeddings", json=body, headers=ann).status_code == 200
    num_tokens = sum(len(service.tokenizer.encode(text)) for text in body["input"])
    assert f"ann POST /v1/embeddings 200 prompt={num_tokens} cached=0 answer=0" in caplog.text
    metrics = client.get("/metrics", headers=ann).text
    counted = 'path="/v1/embeddings",status="200"'
    assert any(counted in line and line.endswith(" 1.0") for line in metrics.splitlines())
    # A queue that is full of others.
    limit = QueueLimit(0, 4, lambda: (4, 0, {"ann": 4}))  # type: ignore[arg-type, return-value]
    full = client_of(replace(service, admit=limit.admit))
    answer = full.post("/v1/embeddings", json=body, headers=ann)
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "queue_full"


def test_inputs_are_cut_for_those_who_ask(embedder: Running):
    """As Ollama's API does."""
    service = embedder.service

    class Context(RequestContext[Any]):
        service = embedder.service  # type: ignore[assignment]

        def for_user(self, generation: Any) -> Any:
            return generation

    context = Context(None, PoolingFields)  # type: ignore[arg-type]
    text = "one two three " * 1000
    inputs = [text, [5] * 5000, "a"]
    generations = read_inputs(Work(), context, inputs, truncates=True)
    whole = service.tokenizer.encode(text)
    assert generations[0].prompt_token_ids == [*whole[:4095], whole[-1]]
    assert generations[1].prompt_token_ids == [5] * 4096
    assert generations[2].prompt_token_ids == service.tokenizer.encode("a")


def test_a_client_that_leaves_frees_everything(embedder: Running):
    service = embedder.service
    client = openai.AsyncOpenAI(base_url=f"{embedder.url}/v1", api_key="none", max_retries=0)

    async def leave() -> None:
        async with client:
            inputs = ["many words " * 100] * 40
            task = asyncio.ensure_future(client.embeddings.create(model="embedder", input=inputs))
            while not service.engine.stats().num_running:
                await asyncio.sleep(0.002)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(leave())
    wait_until(lambda: is_idle(service))
    stats = service.engine.stats()
    assert stats.num_used_blocks == stats.num_running == stats.num_waiting == 0
    assert stats.num_finished["abort"]
