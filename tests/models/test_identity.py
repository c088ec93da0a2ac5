"""What a model is, by content."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from helpers.engine_runs import CONFIG, greedy, livelier_model, make_engine, run
from helpers.fast_lane import mostly_slow
from helpers.mlx_lm_models import DEEPSEEK_V3, GEMMA3, LLAMA, random_model
from helpers.model_zoo import config_of, make_from_config
from helpers.qwen3_helpers import SCALINGS

from mlx_paged import demo_model_path, load
from mlx_paged.models import identity
from mlx_paged.models.identity import may_be_called, model_identity, model_name
from mlx_paged.models.mlx_lm import adapt


def test_two_processes_and_two_copies_of_a_folder_agree(tmp_path: Path) -> None:
    copied = tmp_path / "another name"
    shutil.copytree(demo_model_path(), copied)
    model, _ = load(copied)
    here = model_identity(model)
    code = (
        "from mlx_paged import load, demo_model_path\n"
        "from mlx_paged.models.identity import model_identity\n"
        "print(model_identity(load(demo_model_path())[0]).digest)"
    )
    there = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120
    )
    assert here.digest == there.stdout.strip()
    assert here.name == "another name"


@mostly_slow("config", [LLAMA, GEMMA3, DEEPSEEK_V3], ids=lambda c: c["model_type"])
def test_models_of_mlx_lm_are_the_same_when_they_are_loaded_again(
    config: dict[str, object],
) -> None:
    first, second = (adapt(random_model(config), config) for _ in range(2))
    other = adapt(random_model(config, seed=1), config)
    assert model_identity(first) == model_identity(second)
    assert model_identity(first) != model_identity(other)


@pytest.mark.parametrize("kind", ["llama3", "yarn", "linear"])
def test_a_model_with_scaled_rope_has_an_identity_that_covers_the_scaling(kind: str) -> None:
    """Llama 3.1 and 3.2 have such a module in each layer, which can't be copied."""
    scaling = SCALINGS[kind]
    config = {**LLAMA, "rope_scaling": scaling}
    scaled = model_identity(adapt(random_model(config), config))
    assert scaled == model_identity(adapt(random_model(config), config))
    further = {**config, "rope_scaling": {**scaling, "factor": 16.0}}
    assert scaled != model_identity(adapt(random_model(further), further))


def test_a_model_that_runs_one_sequence_at_a_time_has_an_identity() -> None:
    config = config_of("stablelm")
    first, second = (adapt(make_from_config(config), config) for _ in range(2))
    assert first.description == "stablelm of mlx-lm, per sequence"
    assert model_identity(first) == model_identity(second)


def test_blocks_of_a_model_with_scaled_rope_are_found_after_a_restart(tmp_path: Path) -> None:
    config = {**LLAMA, "rope_scaling": SCALINGS["llama3"]}
    prompt = list(range(1, 41))
    num_cached = []
    for _ in range(2):
        model = adapt(random_model(config), config)
        engine = make_engine(model, block_size=8, kv_cache_bytes="16blocks", cache_dir=tmp_path)
        engine.add_request("a", prompt, greedy(2))
        num_cached.append(run(engine)["a"].num_cached_tokens)
        engine.close()
    assert num_cached == [0, 32]


def test_one_bit_of_one_weight_makes_another_model() -> None:
    model = livelier_model(CONFIG)
    before = model_identity(model).digest
    weight = model.model.layers[1].mlp.down_proj.weight
    bits = weight.view(mx.uint32)
    bits[3, 5] = bits[3, 5] ^ 1
    model.model.layers[1].mlp.down_proj.weight = bits.view(mx.float32)
    assert model_identity(model).digest != before


def test_a_weight_longer_than_a_piece_is_covered_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "PIECE_NBYTES", 100)
    model = livelier_model(CONFIG)
    before = model_identity(model).digest
    weight = model.model.embed_tokens.weight
    weight[-1, -1] = weight[-1, -1] + 1
    model.model.embed_tokens.weight = weight
    assert model_identity(model).digest != before


@pytest.mark.parametrize(
    "change",
    [{"rope_theta": 2e4}, {"rms_norm_eps": 1e-5}, {"tie_word_embeddings": True}],
    ids=lambda change: next(iter(change)),
)
def test_what_no_weight_says_counts_too(change: dict[str, object]) -> None:
    assert model_identity(livelier_model(CONFIG)).digest != (
        model_identity(livelier_model({**CONFIG, **change})).digest
    )


def test_quantised_weights_are_other_weights() -> None:
    model, quantised = livelier_model(CONFIG), livelier_model(CONFIG)
    nn.quantize(quantised, group_size=32, bits=8)
    assert model_identity(model).digest != model_identity(quantised).digest


def test_names_do_not_count() -> None:
    model = livelier_model(CONFIG)
    before = model_identity(model)
    model.name = "Qwen3 in miniature"
    assert model_identity(model).digest == before.digest
    assert str(model_identity(model)) == f"Qwen3 in miniature ({before.digest[:12]})"
    assert before.name == "qwen3"


def test_the_version_of_the_code_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    native, packed = livelier_model(CONFIG), adapt(random_model(LLAMA), LLAMA)
    before = model_identity(native).digest, model_identity(packed).digest
    monkeypatch.setattr(identity.mlx_lm, "__version__", "99")
    assert model_identity(native).digest == before[0]
    assert model_identity(packed).digest != before[1]
    monkeypatch.setattr(identity, "KV_VERSION", 99)
    assert model_identity(native).digest != before[0]


def test_a_model_of_the_hub_is_called_by_its_repository() -> None:
    snapshot = Path("/hub/models--mlx-community--Qwen3-0.6B-4bit/snapshots/abc")
    assert model_name(snapshot) == "mlx-community/Qwen3-0.6B-4bit"
    assert model_name(Path("/models/llama.gguf")) == "llama.gguf"


def test_a_model_may_be_called_by_its_folder_and_by_its_repository(tmp_path: Path) -> None:
    here, copied = tmp_path / "here/Qwen3", tmp_path / "copied/Qwen3"
    link = tmp_path / "link"
    for folder in (here, copied):
        folder.mkdir(parents=True)
    link.symlink_to(here)
    model = livelier_model(CONFIG)
    assert may_be_called(model, "anything"), "it has no name"
    model.name, model.path = model_name(here), here
    for given in (str(here), str(link), f"{here}/", "org/Qwen3", "/gone/Qwen3", "~/gone/Qwen3"):
        assert may_be_called(model, given), given
    for given in (
        str(copied),
        str(tmp_path),
        "org/Qwen4",
        "/gone/Qwen3/other",
        "x" * 5000,
        "\0",
        "~",
    ):
        assert not may_be_called(model, given), given
    snapshot = tmp_path / "models--org--Qwen3/snapshots/abc"
    model.name, model.path = model_name(snapshot), snapshot
    for given in ("org/Qwen3", "/gone/Qwen3", "./Qwen3", str(snapshot)):
        assert may_be_called(model, given), given
    for given in ("else/Qwen3", "org/Qwen3-4bit"):
        assert not may_be_called(model, given), given
