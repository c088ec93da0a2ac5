"""What loads, and what is said in one line when it doesn't."""

import codecs
import inspect
import json
import re
import shutil
import socket
import sys

import huggingface_hub
import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from helpers.hybrid_folders import make_folder
from helpers.mlx_lm_models import random_model, save_adapters
from helpers.model_zoo import config_of
from helpers.qwen3_helpers import CONFIG, random_mlx_lm_model, save_folder
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tuner.utils import linear_to_lora_layers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import mlx_paged
from mlx_paged import LLM, SamplingParams, Sequences, demo_model_path, run_step
from mlx_paged.errors import ArgumentError
from mlx_paged.loading import LoadError, load, read_sampling_defaults
from mlx_paged.loading.outline import read_outline
from mlx_paged.models.identity import model_identity

WORDS = ["<unk>", "<eos>", *(f"w{i}" for i in range(CONFIG["vocab_size"] - 2))]
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def save_tokenizer(folder):
    words = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>")
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", eos_token="<eos>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def whole_folder(tmp_path_factory):
    """A whole model folder: weights, config, tokenizer, chat template."""
    folder = tmp_path_factory.mktemp("whole")
    save_folder(folder, random_mlx_lm_model(CONFIG), {**CONFIG, "eos_token_id": 7})
    save_tokenizer(folder)
    return folder


@pytest.fixture
def folder(whole_folder, tmp_path):
    """A copy of it, to be spoilt."""
    return shutil.copytree(whole_folder, tmp_path / "tiny")


def write_config(folder, **fields):
    """Change fields of the configuration; those that are ``...`` go."""
    config = {**json.loads((folder / "config.json").read_text()), **fields}
    kept = {name: value for name, value in config.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(kept))


def write_weights(folder, **changes):
    """Change weights by their names; those that are ``None`` go."""
    file = str(folder / "model.safetensors")
    weights = mx.load(file)
    mx.eval(weights)
    weights = {name: each for name, each in {**weights, **changes}.items() if each is not None}
    mx.save_safetensors(file, weights, metadata={"format": "mlx"})


def load_error(path_or_hf_repo, **kwargs) -> str:
    """The message of the LoadError that loading raises: one line that opens with ``[load]``."""
    with pytest.raises(LoadError) as raised:
        load(path_or_hf_repo, **kwargs)
    message = str(raised.value)
    assert message.startswith("[load] ")
    assert "\n" not in message
    assert isinstance(raised.value, ValueError)
    return message


# What loads


def test_load_gives_a_model_and_its_tokenizer(folder):
    model, tokenizer = mlx_paged.load(folder)
    assert isinstance(model, nn.Module)
    assert model.model_type == "qwen3"
    assert isinstance(tokenizer, TokenizerWrapper)
    assert tokenizer.encode("w0 w5") == [2, 7]
    messages = [{"role": "user", "content": "w1"}]
    assert tokenizer.apply_chat_template(messages) == [3]


def test_load_takes_the_arguments_of_mlx_lm_by_their_names():
    ours, theirs = inspect.signature(load).parameters, inspect.signature(mlx_lm.load).parameters
    # No code from the folder is ever run.
    assert set(theirs) - set(ours) <= {"trust_remote_code"}
    assert {name: p.default for name, p in ours.items() if name in theirs} == {
        name: theirs[name].default for name in ours if name in theirs
    }
    # Its own are the last, so that places are mlx-lm's. It refuses what it does not know.
    own = ["tokenizer_path", "skip_check", "unknown"]
    assert [name for name in ours if name not in theirs] == list(ours)[-3:] == own
    assert ours["unknown"].kind is inspect.Parameter.VAR_KEYWORD


def test_the_config_is_returned_when_asked_for(folder):
    _, _, config = load(folder, return_config=True)
    assert config["model_type"] == "qwen3"


@pytest.mark.parametrize("model_type", ["qwen3", "llama"])
def test_adapters_are_those_of_mlx_lm(folder, tmp_path, model_type):
    if model_type == "llama":
        config = {**CONFIG, "model_type": "llama"}
        save_folder(folder, random_model(config), config)
    parameters = {
        "rank": 4,
        "scale": 10.0,
        "dropout": 0.0,
        "keys": ["self_attn.q_proj", "mlp.down_proj"],
    }
    theirs, _ = mlx_lm.load(str(folder))
    linear_to_lora_layers(theirs, 1, parameters)
    weights = {
        name: mx.random.normal(w.shape)
        for name, w in tree_flatten(theirs.parameters())
        if "lora_" in name
    }
    assert len(weights) == 4
    adapters = save_adapters(tmp_path / "adapters", weights, parameters)

    def logits(adapter_path):
        model, _ = load(folder, adapter_path=adapter_path)
        return run_step(model, Sequences(mlx_paged.make_kv_cache(model)), {"s": tokens})[0]

    tokens = [3, 1, 4, 1, 5]
    theirs, _ = mlx_lm.load(str(folder), adapter_path=str(adapters))
    expected = theirs(mx.array([tokens]))[0, -1]
    found = logits(str(adapters))
    assert mx.allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert not mx.allclose(logits(None), expected, rtol=1e-2, atol=1e-2)
    with_byte_order_mark(adapters / "adapter_config.json")
    assert mx.array_equal(logits(adapters), found)


def with_byte_order_mark(file):
    """As editors on Windows write it."""
    file.write_bytes(codecs.BOM_UTF8 + file.read_bytes())


@pytest.mark.parametrize("model_type", ["qwen3", "qwen2"])
@pytest.mark.parametrize("names", [["config.json"], None], ids=["the configuration", "every file"])
def test_json_with_a_byte_order_mark_is_read_as_without(folder, names, model_type):
    generation = {"eos_token_id": [3, 7], "temperature": 0.5}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    if model_type == "qwen2":
        config = {**CONFIG, "model_type": "qwen2", "eos_token_id": 7}
        save_folder(folder, random_model(config), config)
    expected, tokenizer, config = load(folder, return_config=True)
    files = [folder / name for name in names] if names else sorted(folder.glob("*.json"))
    assert names or len(files) >= 4
    for file in files:
        with_byte_order_mark(file)
    model, again, read = load(folder, return_config=True)
    assert read == config and model.name == expected.name
    assert model_identity(model) == model_identity(expected)
    assert again.get_vocab() == tokenizer.get_vocab()
    assert again.eos_token_ids == tokenizer.eos_token_ids == {1, 3, 7}
    assert again.chat_template == tokenizer.chat_template
    assert read_sampling_defaults(folder) == {"temperature": 0.5}
    run = [
        run_step(m, Sequences(mlx_paged.make_kv_cache(m)), {"s": [3, 1]}) for m in (model, expected)
    ]
    assert mx.array_equal(run[0][0], run[1][0])
    assert read_outline(folder).model.description == model.description


@pytest.mark.parametrize("is_quantised", [False, True])
def test_dora_on_a_quantised_embedding_is_refused_by_name(tmp_path, is_quantised):
    """mlx-lm takes its packed integers for weights, and fails when the model runs."""
    folder, adapters = tmp_path / "model", tmp_path / "adapters"
    shutil.copytree(demo_model_path(), folder)
    parameters = {"rank": 2, "scale": 1.0, "dropout": 0.0, "keys": ["model.embed_tokens"]}
    save_adapters(adapters, {}, parameters, fine_tune_type="dora")
    if not is_quantised:
        load(folder, adapter_path=adapters)
        return
    model, config = mlx_lm.utils.load_model(folder)
    model, config = mlx_lm.utils.quantize_model(model, config, 32, 8)
    (folder / "model.safetensors").unlink()
    mlx_lm.utils.save_model(folder, model)
    mlx_lm.utils.save_config(config, folder / "config.json")
    assert load_error(folder, adapter_path=adapters) == (
        f"[load] the adapters in {adapters} can't be used: mlx-lm's DoRA can't adapt a quantised "
        "embedding (model.embed_tokens); use a model whose embedding is not quantised, or LoRA"
    )


def test_adapters_that_are_not_there_are_refused(folder):
    with pytest.raises(LoadError, match=r"the adapters in /no/such can't be used: "):
        load(folder, adapter_path="/no/such")


def test_a_loaded_model_talks(folder):
    model, tokenizer = load(folder)
    texts = {
        kv: mlx_paged.generate(model, tokenizer, "w3 w1 w4", max_tokens=5, kv=kv)
        for kv in ("basic", "paged")
    }
    assert texts["basic"] == texts["paged"]
    assert texts["paged"]


def test_a_folder_may_be_a_string_or_below_the_home(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder.parent))
    assert isinstance(load(str(folder))[0], nn.Module)
    assert isinstance(load("~/tiny")[0], nn.Module)


def test_end_tokens_are_the_tokenizers_and_those_of_the_config_or_the_generation_config(folder):
    assert load(folder)[1].eos_token_ids == mlx_lm.load(str(folder))[1].eos_token_ids == {1, 7}
    (folder / "generation_config.json").write_text('{"eos_token_id": [8, 9]}')
    assert load(folder)[1].eos_token_ids == mlx_lm.load(str(folder))[1].eos_token_ids == {1, 8, 9}


def test_lazy_weights_are_the_same_weights(folder):
    eager, lazy = load(folder)[0], load(folder, lazy=True)[0]
    assert mx.array_equal(eager.layers[1].mlp.up_proj.weight, lazy.layers[1].mlp.up_proj.weight)


def test_model_config_replaces_fields_of_the_config(folder):
    assert load(folder, model_config={"rope_theta": 77.0})[0].args.rope_theta == 77.0
    write_config(folder, model_type="llama")
    assert load(folder, model_config={"model_type": "qwen3"})[0].model_type == "qwen3"


def test_tokenizer_config_reaches_the_tokenizer(folder):
    assert load(folder, tokenizer_config={"eos_token": "w5"})[1].eos_token == "w5"


def test_a_hub_id_is_downloaded_and_loaded(folder, monkeypatch):
    calls = []

    def snapshot_download(repo, revision=None, allow_patterns=None):
        calls.append((repo, revision))
        assert {"*.json", "model*.safetensors", "tokenizer.model", "*.jinja"} <= set(allow_patterns)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    model, tokenizer = load("someone/tiny-Qwen3.v2", revision="v1")
    assert (model.model_type, tokenizer.encode("w0")) == ("qwen3", [2])
    assert calls == [("someone/tiny-Qwen3.v2", "v1")]


def test_a_folder_goes_before_a_hub_id_of_the_same_name(folder, monkeypatch):
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub")
    )
    monkeypatch.chdir(folder.parent.parent)
    assert isinstance(load(f"{folder.parent.name}/tiny")[0], nn.Module)


# Nothing is there


def test_a_missing_folder_is_named(tmp_path):
    message = load_error(tmp_path / "nowhere")
    assert "no folder" in message
    assert str(tmp_path / "nowhere") in message


@pytest.mark.parametrize("name", ["qwen", "a/b/c", "owner/", "../x", "two words/x", "a\0b"])
def test_a_name_that_is_neither_folder_nor_hub_id_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub")
    )
    message = load_error(name)
    assert repr(name) in message
    assert "owner/name" in message


def test_a_path_that_the_system_refuses_is_not_a_folder(tmp_path, monkeypatch):
    # The home of nobody, and a name longer than any file system takes: say, a message given as
    # --model.
    monkeypatch.chdir(tmp_path)
    assert "~no-such-user/model" in load_error("~no-such-user/model")
    assert "no folder" in load_error("word " * 1000)


def test_an_empty_name_is_not_a_folder(folder, monkeypatch):
    # Path("") is the current directory, which is not what --model "" means.
    monkeypatch.chdir(folder)
    assert "no folder ''" in load_error("")


def test_a_file_is_not_a_folder(folder):
    message = load_error(folder / "model.safetensors")
    assert "model.safetensors is a file" in message
    assert "give the folder" in message


def test_a_hub_id_without_a_network_is_reported_at_once(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    hosts: list[object] = []

    def refuse(host, *_args, **_kwargs):
        hosts.append(host)
        raise OSError("no network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    message = load_error("nobody/no-such-model")
    assert hosts == [], "it looks for a host rather than saying so at once"
    begin = "[load] no folder 'nobody/no-such-model', no network, and not among the local models: "
    assert message == f"{begin}none"
    for name in ("nobody--no-such-modul", "owner--another", "owner--empty"):
        (tmp_path / f"models--{name}" / "snapshots").mkdir(parents=True)
    for name in ("nobody--no-such-modul", "owner--another"):
        (tmp_path / f"models--{name}" / "snapshots" / "abc").mkdir()
    # The one whose name is most like it first.
    message = load_error("nobody/no-such-model")
    assert message == f"{begin}nobody/no-such-modul, owner/another"


def test_a_repository_that_is_there_in_part_is_not_called_missing(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    (tmp_path / "models--owner--model" / "snapshots" / "abc").mkdir(parents=True)
    message = load_error("owner/model")
    assert message.startswith("[load] no folder 'owner/model', and no such download: ")


def test_whatever_the_hub_raises_becomes_one_line(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    def snapshot_download(*_, **__):
        raise OSError("401 Client Error.\n\nRepository Not Found.\n" + "Please make sure. " * 100)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    message = load_error("nobody/no-such-model")
    assert "401 Client Error. Repository Not Found." in message
    assert len(message) < 500


# The config


def test_a_folder_without_a_config_is_refused_with_what_belongs_there(folder):
    (folder / "config.json").unlink()
    message = load_error(folder)
    assert f"{folder} has no config.json" in message
    assert "model*.safetensors" in message


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{nope",
        b'["a", "list"]',
        b"null",
        b"\xff\xfe\x00",
        pytest.param(b"[" * 100_000, id="nested too deep"),
    ],
)
def test_a_config_that_is_not_a_json_object_is_named(folder, text):
    (folder / "config.json").write_bytes(text)
    message = load_error(folder)
    assert "config.json" in message
    assert "read" in message


def test_a_module_of_mlx_lm_that_ends_the_program_on_import_does_not(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "hf_olmo", None)
    monkeypatch.delitem(sys.modules, "mlx_lm.models.olmo", raising=False)
    write_config(folder, model_type="olmo")
    message = load_error(folder)
    assert "mlx-lm can't load model type 'olmo': To run olmo install ai2-olmo" in message


def test_a_model_that_fails_the_check_at_load_runs_with_skip_check(tmp_path):
    """plamo3's logits in mlx-lm depend on where a prompt is cut."""
    folder = make_folder(tmp_path / "plamo3", config_of("plamo3"))
    with pytest.raises(LoadError, match="model type 'plamo3' fails the check at load: ") as refused:
        load(folder)
    assert refused.value.argument == "skip_check"
    assert str(refused.value).endswith("; to run it all the same, load it with skip_check")
    assert load(folder, skip_check=True)[0].description == "plamo3 of mlx-lm, per sequence"
    llm = LLM(folder, skip_check=True)
    greedy = SamplingParams(max_tokens=8, ignore_eos=True)
    assert len(llm.generate("hello", greedy)[0].outputs[0].token_ids) == 8
    with pytest.raises(ArgumentError, match=r"to run it all the same, mlx_paged.load\(..., skip_c"):
        LLM(*mlx_lm.load(str(folder))[:2])
    with pytest.raises(LoadError, match=r"draft_model: .* load it with skip_check") as refused:
        LLM("demo", draft_model=folder)
    assert refused.value.argument == "draft_model"
    with pytest.raises(LoadError, match="skip_check must be True or False, got 1"):
        load(folder, skip_check=1)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"head_dim": ..., "vocab_size": ...}, "config.json lacks vocab_size, head_dim"),
        ({"rope_theta": ...}, "no rope_theta"),
        ({"model_type": "qwen99"}, "model type 'qwen99' is not supported: mlx-lm"),
        *(
            ({"model_type": kind}, "model_type in config.json must be the name")
            for kind in ("", None, ["qwen3"], "../qwen3", "os.path")
        ),
        *(
            ({field: {key: "dynamic", "factor": 2.0}}, r"'dynamic' is not supported.*yarn")
            for field in ("rope_scaling", "rope_parameters")
            for key in ("type", "rope_type")
        ),
        ({"rope_scaling": {"type": "spiral"}}, "spiral"),
        ({"num_attention_heads": 3}, "3 query heads"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"num_key_value_heads": None}, "num_key_value_heads"),
        ({"hidden_size": "big"}, "hidden_size"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers"),
        ({"quantization": {"bits": 4}}, "lacks group_size"),
        ({"quantization": {"group_size": 64}}, "lacks bits"),
        ({"quantization": {"group_size": "64", "bits": 4}}, "group_size of quantization"),
        ({"quantization": [4]}, "quantization in "),
        ({"quantization_config": {"bits": 4}}, "quant_method"),
        *(
            (
                {"rope_theta": theta},
                rf"rope_theta in config.json must be a finite .* 0, got {shown}",
            )
            for theta, shown in (([1.5], r"\[1.5\]"), (float("inf"), "inf"), (float("nan"), "nan"))
        ),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_theta": True}, "rope_theta"),
        ({"rope_theta": 10**400}, "rope_theta"),
        ({"rope_parameters": {"rope_theta": "big"}, "rope_theta": None}, "rope_theta"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"rope_scaling": {"type": ["yarn"]}}, "the type of rope_scaling"),
        ({"rope_scaling": {"type": "yarn", "factor": float("inf")}}, "factor of rope_scaling"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor of rope_scaling"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers in config.json must be at most 1,000"),
        ({"vocab_size": 10**12}, "vocab_size in config.json must be at most 2,147,483,647"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"max_position_embeddings": -1}, "max_position_embeddings"),
        ({"max_position_embeddings": "long"}, "max_position_embeddings"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings"),
        ({"eos_token_id": "end"}, "eos_token_id"),
        ({"eos_token_id": [1, None]}, "eos_token_id"),
    ],
    ids=lambda value: repr(value)[:50],
)
def test_fields_that_make_no_sense_are_named(folder, fields, named):
    write_config(folder, **fields)
    assert re.search(named, load_error(folder))


@pytest.mark.parametrize("text", ["[1]", '{"eos_token_id": "end"}'])
def test_a_generation_config_that_makes_no_sense_is_named(folder, text):
    (folder / "generation_config.json").write_text(text)
    assert "generation_config.json" in load_error(folder)


def test_no_adapters_are_looked_for_in_a_folder_without_a_name(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert "no folder ''" in load_error(folder, adapter_path="")


def test_sliding_windows_are_those_of_the_config(folder):
    # As Qwen3 is published: a window is given, but not used.
    write_config(folder, use_sliding_window=False, sliding_window=4096, max_window_layers=0)
    assert {spec.window for spec in load(folder)[0].layer_specs} == {None}
    write_config(folder, use_sliding_window=True, sliding_window=4096, max_window_layers=0)
    assert {spec.window for spec in load(folder)[0].layer_specs} == {4096}
    write_config(folder, use_sliding_window=True, sliding_window=None)
    assert "sliding_window in config.json" in load_error(folder)


def test_code_from_the_folder_is_not_run(folder):
    (folder / "custom.py").write_text("raise SystemExit('ran')")
    write_config(folder, model_file="custom.py")
    assert "custom.py" in load_error(folder)


# The weights


def test_a_folder_without_weights_says_so(folder):
    (folder / "model.safetensors").unlink()
    assert "has no weights (model*.safetensors)" in load_error(folder)


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("kept", [0, 4, 100, -1000])
def test_truncated_weights_are_broken_weights(folder, kept, lazy):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    assert f"the model in {folder} is broken" in load_error(folder, lazy=lazy)


def test_a_pointer_that_git_lfs_left_behind_is_not_weights(folder):
    (folder / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    )
    message = load_error(folder)
    assert "model.safetensors" in message


def test_a_missing_shard_is_missing_weights(folder):
    (folder / "model.safetensors").unlink()
    save_folder(folder, random_mlx_lm_model(CONFIG), CONFIG, num_shards=3)
    load(folder)
    (folder / "model-00002-of-00003.safetensors").unlink()
    assert "Missing" in load_error(folder)


LAYER = "model.layers.1"


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize(
    ("name", "weight", "named"),
    [
        (f"{LAYER}.self_attn.k_norm.weight", None, "Missing.*"),
        (f"{LAYER}.mlp.up_proj.weight", mx.zeros((47, 32)), r".*\(48, 32\).*\(47, 32\)"),
        (f"{LAYER}.self_attn.q_proj.bias", mx.zeros((64,)), ""),
        *(
            (f"{LAYER}.self_attn.o_proj.weight", mx.ones((32, 64)).astype(dtype), f"type {dtype}")
            for dtype in (mx.int32, mx.uint32, mx.uint8, mx.bool_, mx.complex64)
        ),
    ],
)
def test_a_weight_that_does_not_fit_is_named(folder, name, weight, named, lazy):
    write_weights(folder, **{name: weight})
    message = load_error(folder, lazy=lazy)
    assert name in message and re.search(named, message)


# The tokenizer


@pytest.mark.parametrize(
    "files",
    [
        *(
            {file: text}
            for file in ("tokenizer.json", "tokenizer_config.json")
            for text in ("", "{nope")
        ),
        # transformers makes up a tokenizer of one word for a folder that has none.
        dict.fromkeys(("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")),
        {"tokenizer.json": None},
    ],
)
def test_a_broken_or_missing_tokenizer_is_named(folder, files):
    for name, text in files.items():
        (folder / name).unlink()
        if text is not None:
            (folder / name).write_text(text)
    assert f"the tokenizer in {folder} is missing or broken" in load_error(folder)


# Tokenizers


@pytest.mark.parametrize(
    ("cut", "resized"),
    [
        (None, [256]),
        (pre_tokenizers.Metaspace(split=False), [256]),
        (pre_tokenizers.Metaspace(), []),
        (pre_tokenizers.ByteLevel(), []),
    ],
    ids=["none", "one piece", "SentencePiece words", "a pattern"],
)
def test_a_tokenizer_that_does_not_cut_words_remembers_few_texts(folder, monkeypatch, cut, resized):
    words = Tokenizer(models.BPE({word: i for i, word in enumerate(WORDS)}, [], unk_token="<unk>"))
    if cut is not None:
        words.pre_tokenizer = cut
    PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", eos_token="<eos>"
    ).save_pretrained(folder)
    sizes = []
    monkeypatch.setattr(models.BPE, "_resize_cache", lambda _, size: sizes.append(size))
    load(folder)
    assert sizes == resized
