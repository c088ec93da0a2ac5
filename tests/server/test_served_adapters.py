"""LoRA adapters of a server: each is a model for all protocols, is listed with its parent, and may
be loaded and unloaded by an administrator, from below one folder.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.asgi import ask as ask_app
from helpers.asgi import echo
from helpers.lora_folders import write_adapter
from helpers.servers import bodies_of, client_of, make_service
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from mlx_paged import demo_model_path, load
from mlx_paged.cli.flags import load_model
from mlx_paged.errors import AdapterError, ArgumentError
from mlx_paged.server.app import App
from mlx_paged.server.http.access import BehindRouter, Principal
from mlx_paged.server.openai.chat import ChatRequest
from mlx_paged.server.program import _prepare_adapters, read_settings, setup_arg_parser
from mlx_paged.server.service import Service
from mlx_paged.server.settings import ServerSettings, read_api_keys

LAYERS = [f"model.layers.0.self_attn.{name}_proj" for name in "qo"]
TEXT = "Once upon a time"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of adapters, ``adapters/a`` and ``adapters/b``, and one beside them, ``outside``."""
    folder, model = tmp_path_factory.mktemp("server"), load(demo_model_path())[0]
    for seed, name in enumerate(("adapters/a", "adapters/b", "outside")):
        write_adapter(folder / name, model, LAYERS, seed=seed, size=30.0)
    return folder


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[Service]:
    adapters = {"a": folder / "adapters/a"}
    made = make_service(adapters=adapters, max_adapters=2, max_adapter_rank=8)
    with made.engine:
        yield made


@pytest.fixture
def client(service: Service, folder: Path) -> Iterator[TestClient]:
    """Of a loopback server without keys."""
    yield client_of(service, ServerSettings(adapters_dir=str(folder / "adapters")))
    for name in set(service.adapter_names) - {"a"}:
        service.engine.unload_adapter(name)


def text_of(path: str, body: dict[str, Any]) -> str:
    if path == "/v1/completions":
        return str(body["choices"][0]["text"])
    if path == "/v1/chat/completions":
        return str(body["choices"][0]["message"]["content"])
    content = body["output"][0]["content"] if path == "/v1/responses" else body["content"]
    return str(content[0]["text"])


def test_an_adapter_is_a_model_of_each_protocol(client: TestClient):
    answers = {}
    for path, body in bodies_of(TEXT, 8).items():
        for model in ("demo", "a"):
            answered = client.post(path, json={**body, "model": model, "temperature": 0}).json()
            assert answered["model"] == model
            answers[path, model] = text_of(path, answered)
        assert answers[path, "demo"] != answers[path, "a"]
        refused = client.post(path, json={**body, "model": "b"})
        assert refused.status_code == 404
        assert "there is no model 'b'; this server has 'demo', 'a'" in refused.text
    chat = {"messages": [{"role": "user", "content": TEXT}], "stream": False}
    options = {"num_predict": 8, "temperature": 0}
    body = {**chat, "model": "a:latest", "options": options}
    said = client.post("/api/chat", json=body).json()["message"]["content"]
    assert said == answers["/v1/chat/completions", "a"]
    names = [each["name"] for each in client.get("/api/tags").json()["models"]]
    assert names == ["demo:latest", "a:latest"]


def test_adapters_are_listed_with_their_parent(client: TestClient):
    demo, adapter = client.get("/v1/models").json()["data"]
    assert (demo["id"], demo["parent"], demo["root"]) == ("demo", None, "demo")
    assert (adapter["id"], adapter["parent"], adapter["root"]) == ("a", "demo", "a")
    assert client.get("/v1/models/a").json() == adapter


def test_adapters_are_loaded_and_unloaded_as_in_vllm(client: TestClient, service: Service):
    def post(verb: str, **body: Any) -> tuple[int, str]:
        answered = client.post(f"/v1/{verb}_lora_adapter", json=body)
        return answered.status_code, answered.text

    prompt = {"prompt": TEXT, "max_tokens": 4, "temperature": 0}
    assert client.post("/v1/completions", json={**prompt, "model": "b"}).status_code == 404
    loaded = 200, "Success: LoRA adapter 'b' added successfully."
    assert post("load", lora_name="b", lora_path="b") == loaded
    answered = client.post("/v1/completions", json={**prompt, "model": "b"})
    assert answered.json()["model"] == "b"
    status, text = post("load", lora_name="b", lora_path="b")
    assert status == 400 and "there is an adapter 'b' already" in text
    assert post("load", lora_name="demo", lora_path="b")[0] == 400
    # Two fit, and "a" was used before "b". The next request for "a" loads it again.
    assert post("load", lora_name="c", lora_path="a")[0] == 200
    assert list(service.engine.engine.adapters.loaded) == ["b", "c"]
    assert service.adapter_names == ("a", "b", "c")
    assert post("load", lora_name="a", lora_path="a")[0] == 400
    answers = {
        name: client.post("/v1/completions", json={**prompt, "model": name}).json()
        for name in ("a", "c")
    }
    assert answers["a"]["choices"] == answers["c"]["choices"]
    assert list(service.engine.engine.adapters.loaded) == ["a", "c"]
    removed = 200, "Success: LoRA adapter 'c' removed successfully."
    assert post("unload", lora_name="c", lora_int_id=1) == removed
    assert post("unload", lora_name="c")[0] == 404
    assert post("unload")[0] == post("load", lora_name="c")[0] == 400
    assert post("load", lora_name="c", lora_path="a", load_inplace=True)[0] == 400


def test_an_adapter_whose_files_are_gone_is_an_error_without_their_place(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    gone = Path(shutil.copytree(folder / "adapters/b", tmp_path / "b"))
    adapters = {"a": folder / "adapters/a", "b": gone}
    service = make_service(adapters=adapters, max_adapters=1)
    with service.engine:
        client, body = client_of(service), {"prompt": TEXT, "max_tokens": 2}
        shutil.rmtree(gone)
        answered = client.post("/v1/completions", json={**body, "model": "b"})
        assert answered.status_code == 500
        assert answered.json()["error"]["message"] == "the adapter 'b' can't be loaded again"
        assert str(gone) in caplog.text
        assert client.post("/v1/completions", json={**body, "model": "a"}).status_code == 200


def test_adapters_come_from_below_one_folder_without_links_out(
    client: TestClient, service: Service, folder: Path
):
    root = folder / "adapters"
    (root / "link").symlink_to(folder / "outside")
    shutil.copytree(root / "a", root / "with_a_link")
    file = root / "with_a_link/adapters.safetensors"
    file.unlink()
    file.symlink_to(folder / "outside/adapters.safetensors")
    (root / "inside").symlink_to(root / "b")
    outside = str(folder / "outside")
    for path in ("../outside", outside, "link", "with_a_link", ".", "", "b\0", "/etc"):
        body = {"lora_name": "x", "lora_path": path}
        answered = client.post("/v1/load_lora_adapter", json=body)
        assert answered.status_code == 400, path
        assert outside not in answered.text or path == outside
    missing = client.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": "none"})
    assert missing.status_code == 404
    for path in ("inside", str(root / "b")):
        body = {"lora_name": "x", "lora_path": path}
        assert client.post("/v1/load_lora_adapter", json=body).status_code == 200
        service.engine.unload_adapter("x")
    without = client_of(service).post("/v1/load_lora_adapter", json=body)
    assert without.status_code == 403 and "--adapters-dir" in without.text


def test_only_an_administrator_loads_and_unloads(service: Service, folder: Path):
    keys = read_api_keys(["alice sesame", "root abracadabra admin"])
    settings = ServerSettings(adapters_dir=str(folder / "adapters"), api_keys=keys)
    client = client_of(service, settings)

    def status(verb: str, key: str) -> int:
        body = {"lora_name": "b", **({"lora_path": "b"} if verb == "load" else {})}
        headers = {"Authorization": f"Bearer {key}"}
        answered = client.post(f"/v1/{verb}_lora_adapter", json=body, headers=headers)
        return answered.status_code

    assert [status(verb, "sesame") for verb in ("load", "unload")] == [403, 403]
    assert status("load", "wrong") == 401
    assert [status(verb, "abracadabra") for verb in ("load", "unload")] == [200, 200]
    # Without keys, on an address that other machines can reach.
    open_app = App(replace(service, settings=replace(settings, api_keys=())), is_loopback=False)
    body = {"lora_name": "b", "lora_path": "b"}
    reached = TestClient(open_app, "http://127.0.0.1").post("/v1/load_lora_adapter", json=body)
    assert reached.status_code == 403
    # A router passes on who is one.
    passed = Principal("root", "salt", False, frozenset({"x"}), is_admin=True)
    name, value = passed.header()
    state = ask_app(BehindRouter(echo), headers={name.decode(): value.decode()}).state
    assert state["principal"] == replace(passed, models=None)


def test_an_adapter_that_was_unloaded_meanwhile_is_an_unknown_model(
    client: TestClient, service: Service, monkeypatch: pytest.MonkeyPatch
):
    def gone(name: str | None) -> None:
        if name is not None:
            raise AdapterError(f"there is no adapter {name!r}")

    monkeypatch.setattr(service.engine.engine.adapters, "find", gone)
    answered = client.post("/v1/completions", json={"prompt": TEXT, "model": "a"})
    assert answered.status_code == 404
    assert answered.json()["error"]["code"] == "model_not_found"


def test_kept_answers_and_metrics_tell_adapters_apart(client: TestClient, service: Service):
    body = ChatRequest.read({"messages": [{"role": "user", "content": "x"}], "model": "a"})
    generation = body.generation(service, body.structured())
    assert generation.answer_salt == '[null, "a"]' and generation.cache_salt is None
    families = text_string_to_metric_families(client.get("/metrics").text)
    [info] = [each for each in families if each.name == "vllm:lora_requests_info"]
    labels = info.samples[0].labels
    assert labels["max_lora"] == "2"
    assert labels["running_lora_adapters"] == labels["waiting_lora_adapters"] == ""


def test_flags_make_room_for_adapters(folder: Path):
    def options_of(*argv: str) -> dict[str, Any]:
        args = setup_arg_parser("x").parse_args(["--kv-cache-bytes", "100blocks", *argv])
        _, _, options, _ = load_model(args, "server")
        _prepare_adapters(options, read_settings(args), ["demo"])
        return options

    adapter, root = f"a={folder / 'adapters/a'}", str(folder / "adapters")
    assert options_of("--adapter", adapter)["max_adapters"] == 1
    assert options_of("--adapter", adapter, "--adapters-dir", root)["max_adapters"] == 8
    assert options_of("--adapters-dir", root, "--max-adapters", "3")["max_adapters"] == 3
    with pytest.raises(ArgumentError, match="'demo' is the name of the model"):
        options_of("--adapter", "demo=x")
    with pytest.raises(ArgumentError, match="adapters_dir: no folder '/nowhere'"):
        options_of("--adapters-dir", "/nowhere")
