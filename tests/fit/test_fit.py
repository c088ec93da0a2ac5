"""``mlx-paged fit``: sizes against those of models that are loaded, published ones, verdicts, and
the hub.
"""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import huggingface_hub
import mlx.core as mx
import mlx.nn as nn
import pytest
from helpers.fake_hub import hub, write_header, write_model
from helpers.gguf_files import write_demo
from helpers.mlx_lm_models import DEEPSEEK_V3, GEMMA3, GPT_OSS, LLAMA, Config, random_model
from helpers.model_zoo.published import FULL_SIZE
from helpers.qwen3_helpers import save_folder
from mlx.utils import tree_flatten

from mlx_paged.cli.fit.machine import Machine, _free_of_vm_stat, free_memory
from mlx_paged.cli.fit.program import main, main_of_list
from mlx_paged.cli.fit.verdict import Fit, Footprint
from mlx_paged.core import BudgetSizes
from mlx_paged.errors import ArgumentError
from mlx_paged.loading import LoadError, demo_model_path, find_model_for, load
from mlx_paged.loading.outline import read_outline
from mlx_paged.models import memory
from mlx_paged.models.kv_cache import NUM_COPIES_AHEAD, make_kv_cache
from mlx_paged.models.language_model import LanguageModel
from mlx_paged.models.memory import format_nbytes
from mlx_paged.models.mlx_lm.draft_head import LAYOUTS, DraftHead
from mlx_paged.options.config import KVBits

GIB = 2**30
WAYS_OUT = "--kv-bits 8, or --context 30976, or --context 40960 --parallel 1"
QWEN3_30B_A3B: Config = FULL_SIZE["Qwen3-235B-A22B"] | {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
}


@cache
def model_of(folder: Path) -> LanguageModel:
    """The model of a folder, which is outlined once for all tests of it."""
    return read_outline(folder).model


def footprint(folder: Path, bits: KVBits | None = None) -> Footprint:
    return Footprint(model_of(folder), bits)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as large as Qwen3-30B-A3B in 4 bits."""
    folder = tmp_path_factory.mktemp("large") / "Qwen3-30B-A3B-4bit"
    write_model(folder, QWEN3_30B_A3B, bits=4)
    return folder


# Sizes


@pytest.mark.parametrize(
    "config", [LLAMA, GEMMA3, GPT_OSS, DEEPSEEK_V3], ids=["llama", "windows", "experts", "latents"]
)
def test_weights_and_kv_are_what_mlx_allocates_for_them(config: Config, tmp_path: Path):
    # So many tokens that the rounding of small arrays to pages does not count.
    config = {**config, "vocab_size": 16_384}
    save_folder(tmp_path, random_model(config), config)
    estimate = footprint(tmp_path)
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    model, _ = load(tmp_path, tokenizer_path=demo_model_path())
    gc.collect()
    weights = mx.get_active_memory() - before
    assert estimate.weight_nbytes == pytest.approx(weights, rel=0.03)

    num_tokens, num_seqs = 1000, 3
    nbytes = estimate.kv_nbytes(num_tokens, num_seqs)
    before = mx.get_active_memory()
    cache = make_kv_cache(model, kv_cache_bytes=nbytes, preallocate=True)
    mx.eval(cache.arrays)
    assert mx.get_active_memory() - before == pytest.approx(nbytes, rel=0.03)
    assert estimate.num_tokens(nbytes, num_seqs) == min(estimate.context_length, 1008)


def test_a_published_model_has_the_sizes_that_its_page_says(large: Path):
    found = footprint(large)
    assert found.num_parameters == 30_532_122_624
    # 4 bits, and a scale and a bias of 16 bits for each 64: 4.5 bits; norms are of 16.
    assert found.weight_nbytes == pytest.approx(30_532_122_624 * 4.5 / 8, rel=1e-3)
    assert found.nbytes_per_token == 48 * 4 * 128 * 2 * 2
    assert footprint(large, KVBits(8, 8)).nbytes_per_token == 48 * 4 * (128 + 2 * 4) * 2
    assert found.context_length == 40_960


def test_nothing_of_the_weights_is_read(large: Path):
    gc.collect()
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    outline = read_outline(large)
    assert Footprint(outline.model).activation_nbytes(1000, 4) > 0
    # A small copy of the model was tried.
    assert mx.get_peak_memory() - before < 2**28
    assert outline.model.description == "qwen3_moe of mlx-lm, packed"


@pytest.mark.parametrize(
    ("name", "description", "per_token", "state_mb"),
    [
        ("Llama-3.1-70B", "llama of mlx-lm, packed", 327_680, 0),
        ("Qwen3-Next-80B-A3B", "qwen3_next of mlx-lm, packed, with state", 24_576, 77.3),
        ("DeepSeek-V3", "deepseek_v3 of mlx-lm, packed", 70_272, 0),
        ("Llama-4-Scout", "llama4 of mlx-lm, per sequence, its text part only", 196_608, 0),
    ],
)
def test_models_as_published(
    name: str, description: str, per_token: int, state_mb: float, tmp_path: Path
):
    write_model(tmp_path / name, FULL_SIZE[name], bits=4)
    outline = read_outline(tmp_path / name)
    found = Footprint(outline.model)
    assert outline.model.description == description
    assert found.nbytes_per_token == per_token
    assert outline.model.state_nbytes / 1e6 == pytest.approx(state_mb, abs=0.05)


def test_a_windowed_layer_keeps_its_window_alone(tmp_path: Path):
    write_model(tmp_path / "gemma", FULL_SIZE["gemma-3-27b"], bits=4)
    found = footprint(tmp_path / "gemma")
    # 52 of 62 layers see 1,024 tokens.
    assert found.kv_nbytes(131_072, 1) < found.nbytes_per_token * 131_072 / 4


def test_a_token_beyond_the_windows_costs_the_layers_without_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    write_model(tmp_path / "gemma", FULL_SIZE["gemma-3-27b"], bits=4)
    found = footprint(tmp_path / "gemma")
    # 10 of 62 layers, with 16 KV heads of 128 in 16 bits.
    assert (found.nbytes_per_token, found.nbytes_per_late_token) == (62 * 8192, 10 * 8192)
    args = [str(tmp_path / "gemma"), "--memory", "64G", "--context", "131072"]
    assert main(args) == 0
    assert (
        "a conversation of 131,072 tokens; 81,920 bytes a token beyond the windows, 507,904 within "
        "them, as the model computes them\n"
    ) in capsys.readouterr().out
    assert main([*args, "--json"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert (read["kv_per_token"], read["kv_per_late_token"]) == (507_904, 81_920)


def test_a_gguf_file_is_as_large_as_its_model_in_memory(tmp_path: Path):
    path = write_demo(tmp_path / "demo.gguf", "Q8_0")
    found = footprint(path)
    model, _ = load(path)
    assert found.weight_nbytes == Footprint(model).weight_nbytes
    assert found.nbytes_per_token == Footprint(model).nbytes_per_token


def test_a_step_reads_the_experts_that_its_tokens_choose(large: Path):
    found = footprint(large)
    fit = Fit(found, Machine.mac(64 * GIB, "M2 Max"), context=4096)
    bandwidth, launches = 400e9, 48 * 14 * 4e-6
    head = 151936 * 2048 * 4.5 / 8
    # Every expert has three matrices.
    expert = 3 * 2048 * 768 * 4.5 / 8
    attention = (2048 * 128 * (32 + 4 + 4) + 32 * 128 * 2048 + 2048 * 128) * 4.5 / 8
    for num_seqs in (1, 16):
        num_experts = 128 * (1 - (1 - 8 / 128) ** num_seqs)
        nbytes = head + 48 * (attention + num_experts * expert)
        nbytes += num_seqs * 4096 * found.nbytes_per_token
        speed = fit.tokens_per_second(num_seqs)
        assert speed == pytest.approx(num_seqs / (nbytes / bandwidth + launches), rel=0.01)


# Heads


HEAD = {
    "projection": "mtp.fc",
    "embedding_norm": "mtp.pre_fc_norm_embedding",
    "hidden_norm": "mtp.pre_fc_norm_hidden",
    "end_norm": "mtp.norm",
    "layer": "mtp.layers.0",
}


@pytest.fixture(scope="module")
def with_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as large as Qwen3-Next-80B-A3B in 4 bits, with its head."""
    folder = tmp_path_factory.mktemp("hub") / "owner" / "next"
    write_model(folder, FULL_SIZE["Qwen3-Next-80B-A3B"], bits=4)
    head = DraftHead(model_of(folder), LAYOUTS["qwen3_next"])
    nn.quantize(head, group_size=64, bits=4)
    weights = {}
    for name, weight in tree_flatten(head.parameters()):
        part, _, rest = name.partition(".")
        weights[f"{HEAD[part]}.{rest}"] = weight
    (folder / "mtp").mkdir()
    write_header(folder / "mtp" / "model.safetensors", weights)
    return folder


def test_a_head_counts_with_its_layer_and_the_rows_that_are_kept_for_it(with_head: Path):
    outline = read_outline(with_head, draft_model="auto")
    assert outline.draft_model is not None
    plain, found = footprint(with_head), Footprint(outline.model, None, outline.draft_model)
    # 4.5 bits a weight: the projection, attention with an output gate, 512 experts and one more.
    attention = 2048 * 256 * (2 * 16 + 2 + 2) + 16 * 256 * 2048
    num_weights = 2 * 2048 * 2048 + attention + 513 * 3 * 2048 * 512 + 2048 * 513
    assert found.draft_nbytes == pytest.approx(num_weights * 4.5 / 8, rel=1e-3)
    assert found.weight_nbytes == plain.weight_nbytes + found.draft_nbytes
    # Two heads of 256 for K and V, and a row of 2,048 for each 16 tokens, in 16 bits.
    per_token = 2 * 2 * 256 * 2 + 2048 * 2 // 16
    assert found.nbytes_per_token == plain.nbytes_per_token + per_token
    assert found.state_nbytes(4) == plain.state_nbytes(4) * 5 / 4


def test_states_of_a_recurrent_draft_model_count(with_head: Path):
    plain = footprint(with_head)
    drafting = Footprint(plain.model, None, plain.model)
    assert drafting.state_nbytes(4) == 2 * plain.state_nbytes(4) * 5 / 4 > 0


def test_the_speed_with_drafts_follows_from_the_cost_of_their_rows(with_head: Path):
    outline = read_outline(with_head, draft_model="auto")
    found = Footprint(outline.model, None, outline.draft_model)
    fit = Fit(found, Machine.mac(128 * GIB, "M1 Max"), context=4096)
    plain, drafting = 1 / fit.tokens_per_second(1), 1.7 / fit.tokens_per_second(1, 1)
    # Two rows of a mixture of experts cost 1.27 times one, and the wait 0.3 times.
    a_pass = drafting - 1.57 * plain
    output = 151_936 * 2048 * 4.5 / 8
    chosen = (11 / 513) * (513 * 3 * 2048 * 512 * 4.5 / 8)
    assert a_pass == pytest.approx((output + chosen) / 400e9 + 14 * 4e-6, rel=0.3)
    sooner = Fit(found, Machine.mac(128 * GIB, "M5 Max"), context=4096)
    assert sooner.tokens_per_second(1) > fit.tokens_per_second(1)
    plain_fit = Fit(footprint(with_head), fit.machine, context=4096)
    assert plain_fit.tokens_per_second(1) == pytest.approx(fit.tokens_per_second(1), rel=1e-3)


# Verdicts


def fit_of(folder: Path, memory: int, **settings: Any) -> Fit:
    return Fit(footprint(folder), Machine.mac(memory), **settings)


def test_what_fits_says_yes(large: Path):
    fit = fit_of(large, 48 * GIB, context=32_768)
    assert (fit.is_yes, fit.loads, fit.longest_context(1)) == (True, True, 40_960)


def test_weights_may_take_more_than_four_fifths_of_what_metal_recommends(tmp_path: Path):
    write_model(tmp_path / "next", FULL_SIZE["Qwen3-Next-80B-A3B"], bits=4)
    fit = fit_of(tmp_path / "next", 64 * GIB, context=32_768)
    assert fit.footprint.weight_nbytes > 0.8 * fit.machine.recommended
    assert (fit.is_yes, fit.loads) == (True, True)


def test_the_sum_is_that_of_an_engine_with_its_defaults(large: Path):
    fit = fit_of(large, 48 * GIB, context=32_768, num_seqs=6)
    left = fit.machine.recommended - fit.footprint.weight_nbytes
    assert fit.budget == int(0.8 * left) < left - fit.activations
    assert fit.kv_nbytes == (6 * 32_768 + 16) * fit.footprint.nbytes_per_token
    each = fit.longest_context(6)
    assert fit.footprint.kv_nbytes(each, 6) <= fit.budget < fit.footprint.kv_nbytes(each + 16, 6)


def test_too_many_conversations_fit_with_fewer_bits_or_shorter_ones(large: Path):
    fit = fit_of(large, 48 * GIB, context=40_960, num_seqs=6)
    assert not fit.is_yes
    assert fit.ways_out() == [
        "--kv-bits 8",
        "--context 30976",
        "--context 40960 --parallel 1",
    ]


def test_what_is_offered_fits(large: Path):
    fit = fit_of(large, 32 * GIB, context=40_960, num_seqs=4)
    way_out = fit.ways_out()[-1]
    assert way_out == "--context 40960 --parallel 1"
    assert fit_of(large, 32 * GIB, context=40_960).is_yes


def test_where_weights_leave_little_activations_come_before_kv(large: Path):
    fit = fit_of(large, 24 * GIB)
    left = fit.machine.recommended - fit.footprint.weight_nbytes
    assert fit.budget == left - fit.activations < int(0.8 * left)
    assert fit.ways_out() == ["--kv-bits 4", "--context 14592"]
    assert fit_of(large, 24 * GIB, context=14_592).is_yes
    assert not fit_of(large, 24 * GIB, context=14_592 + 256).is_yes


def test_a_budget_that_leaves_memory_for_activations_alone_is_offered_first(tmp_path: Path):
    """The default one leaves a fifth, and these are less."""
    write_model(tmp_path / "next", FULL_SIZE["Qwen3-Next-80B-A3B"], bits=4)
    fit = fit_of(tmp_path / "next", 127 * GIB // 2)
    assert not fit.is_yes
    assert fit.ways_out() == ["--kv-cache-bytes 6.5G", "--kv-bits 8", "--context 259584"]
    model, step = fit.footprint.model, GIB // 4
    for budget, is_yes in ((6 * GIB + 2 * step, True), (6 * GIB + step, False)):
        assert Fit(Footprint(model), fit.machine, kv_cache_bytes=budget).is_yes == is_yes
    machine = ["--memory", "63.5G", "--kv-cache-bytes", "6.5G"]
    assert main([str(tmp_path / "next"), *machine]) == 0


def test_weights_that_are_too_large_have_no_way_out(large: Path):
    fit = fit_of(large, 16 * GIB)
    assert (fit.is_yes, fit.loads, fit.ways_out()) == (False, False, [])


def test_states_count_in_all_their_copies(tmp_path: Path):
    write_model(tmp_path / "hybrid", FULL_SIZE["Falcon-H1-34B"], bits=4)
    fit = fit_of(tmp_path / "hybrid", 64 * GIB, context=8192, num_seqs=4)
    state = fit.footprint.model.state_nbytes
    assert fit.state_nbytes == 4 * 4 * state > 4.8e9
    # What the states leave of the budget is for K/V, as in an engine.
    for num_seqs in (1, 3, 4, 8):
        block = fit.footprint.one_block.nbytes_per_block
        sizes = BudgetSizes(fit.budget, block, state, NUM_COPIES_AHEAD)
        most = sizes.max_num_blocks(num_seqs) // num_seqs * 16
        assert fit.longest_context(num_seqs) == min(most, fit.footprint.context_length) > 0


def test_a_context_beyond_the_model_is_refused(large: Path):
    with pytest.raises(ArgumentError, match="made for 40,960 tokens, got 50,000"):
        fit_of(large, 48 * GIB, context=50_000)


# Machines


def test_free_memory_is_within_that_of_the_machine():
    free = free_memory()
    assert free is not None
    assert 0 < free <= Machine.here().memory


def test_what_macos_says_of_its_pages_is_added_up():
    said = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                               10000.
Pages active:                            300000.
Pages inactive:                            2000.
Pages speculative:                          300.
Pages throttled:                              0.
Pages wired down:                        100000.
Pages purgeable:                             40.
"""
    assert _free_of_vm_stat(said) == 12_340 * 16_384
    assert _free_of_vm_stat("") is None


@pytest.mark.parametrize(
    ("gib", "megabytes", "before"),
    [
        (16, 12_713, 11_453), (18, 14_302, 12_885), (24, 19_070, 17_180), (32, 26_801, 22_906),
        (36, 28_991, 25_770), (48, 40_201, 38_655), (64, 55_663, 51_540), (128, 115_449, 103_079),
        (512, 498_216, 412_317),
        # No reports: the share of the next smaller one.
        (8, 5_727, 5_727), (20, 15_891, 14_317), (96, 83_494, 77_309), (192, 173_173, 154_619),
    ],
)  # fmt: skip
def test_what_metal_recommends_on_another_mac_is_what_such_macs_report(
    gib: int, megabytes: int, before: int
):
    machine = Machine.mac(gib * GIB)
    assert machine.recommended == pytest.approx(megabytes * 1e6, rel=1e-4)
    assert machine.recommended_before == pytest.approx(before * 1e6, rel=1e-4)


# The program


def test_it_prints_a_table_and_a_verdict(large: Path, capsys: pytest.CaptureFixture[str]):
    args = ["--memory", "32G", "--chip", "M2 Max", "--context", "32768", "--parallel", "4"]
    assert main([str(large), *args]) == 0
    assert capsys.readouterr().out == (
        """\
Qwen3-30B-A3B-4bit (qwen3_moe of mlx-lm, packed)

  weights        17.2 GB  30.5 billion parameters
  K/V            12.9 GB  4 of 32,768 tokens each; 98,304 bytes a token, as the model computes them
  activations     0.5 GB  of the largest step, estimated
  all            30.5 GB

M2 Max, 34.4 GB of memory; Metal recommends at most 26.8 GB on such Macs, and 22.9 GB with older \
versions of macOS. K/V may take 7.7 GB by default.
context that fits: 40,960 tokens for one conversation, the model's whole context; 19,568 tokens \
for each of 4
speed at that context, an estimate at most: 67 tokens/s alone, 87 tokens/s at 4 together (bytes \
read over 400 GB/s, and 14 launches of 4 us per layer; not measured on a Mac)

yes, with --kv-bits 8, or --context 19456, or --context 32768 --parallel 1
"""
    )


@pytest.mark.parametrize(
    ("args", "status", "verdict"),
    [
        (["--memory", "64G"], 0, "yes"),
        (["--memory", "48G", "--parallel", "6"], 0, "yes, with " + WAYS_OUT),
        (
            ["--memory", "16G"],
            1,
            "no: the weights alone exceed the 12.7 GB that Metal recommends; use a smaller model, "
            "or one with fewer bits per weight",
        ),
        (
            ["--memory", "22G", "--context", "8192"],
            1,
            "no: the weights leave memory for 0 tokens of K/V; use a smaller model, or one with "
            "fewer bits per weight",
        ),
    ],
)
def test_its_status_says_the_verdict(
    args: list[str], status: int, verdict: str, large: Path, capsys: pytest.CaptureFixture[str]
):
    assert main([str(large), *args]) == status
    assert capsys.readouterr().out.splitlines()[-1] == verdict


def test_the_flags_that_it_offers_make_the_model_fit(
    large: Path, capsys: pytest.CaptureFixture[str]
):
    machine = ["--memory", "48G", "--parallel", "6"]
    for flags in WAYS_OUT.split(", or "):
        assert main([str(large), *machine, *flags.split()]) == 0
        assert capsys.readouterr().out.splitlines()[-1] == "yes"


def test_bits_of_k_and_v_are_in_the_sum_and_in_the_list(
    large: Path, capsys: pytest.CaptureFixture[str]
):
    nbytes, lists = [], []
    for flags in ([], ["--kv-bits", "8"], ["--kv-bits", "K:8,V:4"], ["--kv-bits", "4"]):
        assert main([str(large), "--json", *flags]) in (0, 1)
        nbytes.append(json.loads(capsys.readouterr().out)["kv_per_token"])
        assert main_of_list([str(large.parent), "--memory", "24G", *flags]) == 0
        lists.append(capsys.readouterr().out)
    # 48 layers of 4 KV heads: 128 values of 2 bytes, or packed with 8 bytes of scales and biases.
    each = [(256, 256), (128 + 8, 128 + 8), (128 + 8, 64 + 8), (64 + 8, 64 + 8)]
    assert nbytes == [48 * 4 * (key + value) for key, value in each]
    assert len(set(lists)) == 4


def test_json_has_the_same_in_bytes(large: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(large), "--memory", "64G", "--parallel", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kv"] == (2 * 40_960 + 16) * 98_304
    assert found["context_that_fits"] == {"1": 40_960, "2": 40_960}
    assert (found["fits"], found["fits_with"], found["free"]) == (True, [], None)


def test_room_for_adapters_is_in_the_sum(capsys: pytest.CaptureFixture[str]):
    def figures(*argv: str) -> dict[str, int]:
        assert main(["demo", "--json", *argv]) == 0
        found: dict[str, int] = json.loads(capsys.readouterr().out)
        return found

    plain, two = figures(), figures("--max-adapters", "2", "--max-adapter-rank", "8")
    assert plain["adapters"] == 0 < two["adapters"] == two["weights"] - plain["weights"]
    four = figures("--max-adapters", "5", "--max-adapter-rank", "16")
    assert four["adapters"] == 4 * two["adapters"]  # one more slot is for rows without


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["/nowhere"], "no folder '/nowhere'"),
        (
            ["demo", "--context", "5000"],
            "--context: the model was made for 4,096 tokens, got 5,000",
        ),
        (["demo", "--chip", "M9"], "unknown chip 'M9'; known: M1, M1 Pro"),
        (["demo", "--kv-bits", "3"], "argument --kv-bits"),
        (["demo", "--parallel", "0"], "argument --parallel"),
        (["demo", "--draft-model", "/nowhere"], "--draft-model: no folder '/nowhere'"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    args: list[str], says: str, capsys: pytest.CaptureFixture[str]
):
    assert main(args) == 2
    said = capsys.readouterr()
    assert (says in said.err, said.out, said.err.count("\n")) == (True, "", 1)


# The hub


def run(*args: str, home: Path, endpoint: str | None) -> subprocess.CompletedProcess[str]:
    address = {"HF_HUB_OFFLINE": "1"} if endpoint is None else {"HF_ENDPOINT": endpoint}
    return subprocess.run(
        [sys.executable, "-m", "mlx_paged", "fit", *args],
        env={**os.environ, "HF_HOME": str(home), "HF_HUB_DISABLE_PROGRESS_BARS": "1", **address},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_repository_is_judged_before_it_is_downloaded(tmp_path: Path):
    size = write_model(tmp_path / "hub" / "owner" / "large", QWEN3_30B_A3B, bits=4)
    with hub(tmp_path / "hub") as endpoint:
        args = ("owner/large", "--memory", "64G", "--json")
        done = run(*args, home=tmp_path / "home", endpoint=endpoint)
        found = json.loads(done.stdout)
        assert (done.returncode, found["weights"], found["model"]) == (0, size, "owner/large")
        assert 0 < found["bytes_to_download"] - size < 2**20
        missing = run("owner/missing", home=tmp_path / "home", endpoint=endpoint)
    assert missing.returncode == 2
    assert "no folder 'owner/missing', and the lookup on the hub failed" in missing.stderr


def test_a_head_of_a_repository_is_judged_before_it_is_downloaded(with_head: Path, tmp_path: Path):
    args = ("owner/next", "--memory", "128G", "--chip", "M1 Max", "--draft-model")
    with hub(with_head.parents[1]) as endpoint:
        done = run(*args, "auto", home=tmp_path / "home", endpoint=endpoint)
    assert done.returncode == 0, done.stderr
    size = format_nbytes(Footprint(model_of(with_head)).weight_nbytes)
    assert f"  weights{size:>15}  79.7 billion parameters\n" in done.stdout
    assert "  draft model     0.9 GB  qwen3_next, head\n" in done.stdout
    words = r"with as many drafts per step as pay, an estimate: \d+ tokens/s alone with 2 \(if 70%"
    assert re.search(words, done.stdout)


def test_without_a_network_what_is_unknown_is_said(tmp_path: Path):
    done = run("owner/large", home=tmp_path, endpoint=None)
    assert (done.returncode, done.stdout) == (2, "")
    assert "no folder 'owner/large', and the lookup on the hub failed" in done.stderr


def test_a_repository_that_is_on_this_machine_needs_no_network(tmp_path: Path):
    snapshot = tmp_path / "hub" / "models--owner--model" / "snapshots" / ("0" * 40)
    write_model(snapshot, LLAMA)
    refs = tmp_path / "hub" / "models--owner--model" / "refs"
    refs.mkdir()
    (refs / "main").write_text("0" * 40)
    done = run("owner/model", "--json", home=tmp_path, endpoint=None)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"] == "owner/model"
    assert json.loads(done.stdout)["bytes_to_download"] == 0


def test_a_folder_without_weights_is_named(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(LoadError, match="has no weights"):
        read_outline(tmp_path)


# The list


def test_models_on_this_machine_are_listed(
    large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    cache = tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    snapshots = cache / "models--owner--begun" / "snapshots" / ("0" * 40)
    snapshots.mkdir(parents=True)
    (cache / "models--owner--begun" / "refs").mkdir()
    (cache / "models--owner--begun" / "refs" / "main").write_text("0" * 40)
    models = tmp_path / "models"
    (models / "large").mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (models / "large" / name).symlink_to(large / name)
    write_demo(models / "small.gguf", "Q8_0")
    write_model(models / "strange", LLAMA)
    strange = {**LLAMA, "model_type": "strange"}
    (models / "strange" / "config.json").write_text(json.dumps(strange))
    assert main_of_list([str(models), "--memory", "24G"]) == 0
    lines = [re.sub(" {2,}", "|", line) for line in capsys.readouterr().out.splitlines()]
    assert lines[:4] == [
        "model|weights|runs|fits",
        "owner/begun|not fully downloaded",
        f"{models}/large|17.2 GB|qwen3_moe of mlx-lm, packed|yes, with 14,608 of 40,960 tokens",
        f"{models}/small.gguf|1.4 MB|qwen3, native|yes, with all 4,096 tokens of context",
    ]
    assert lines[4].startswith(f"{models}/strange|refused|model type 'strange' is not supported")


def test_an_empty_list_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert main_of_list([str(tmp_path)]) == 0
    assert capsys.readouterr().out == "no models in the hub's cache or the given folders\n"
    assert main_of_list([str(tmp_path / "nowhere")]) == 2
    assert "is not a folder" in capsys.readouterr().err


# The programs


@pytest.mark.parametrize("command", [("chat", "Hello"), ("serve",)], ids=["chat", "serve"])
def test_a_model_that_is_too_large_is_refused_before_it_is_read(
    command: tuple[str, ...], tmp_path: Path
):
    config = {**FULL_SIZE["Llama-3.1-70B"], "num_hidden_layers": 800}
    size = write_model(tmp_path / "large", config)
    done = subprocess.run(
        [sys.executable, "-m", "mlx_paged", *command, "--model", str(tmp_path / "large")],
        capture_output=True,
        text=True,
        check=False,
    )
    whole = format_nbytes(Machine.here().limit)
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        f"[load] the weights take {format_nbytes(size)}, and this machine has {whole} of memory; "
        "use a smaller model or one of fewer bits (mlx-paged fit says what fits), or load it with "
        "--force"
    ) in done.stderr


def test_a_model_that_is_too_large_is_not_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write_model(tmp_path / "hub" / "owner" / "large", QWEN3_30B_A3B, bits=4)
    monkeypatch.setattr(memory, "memory_size", lambda: 8 * GIB)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "home"))
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *_, **settings: _only_here(settings)
    )
    with hub(tmp_path / "hub") as endpoint:
        monkeypatch.setattr(
            huggingface_hub, "HfApi", lambda: huggingface_hub.hf_api.HfApi(endpoint)
        )
        with pytest.raises(LoadError, match=r"take 17\.2 GB, and this machine has 8\.6 GB"):
            find_model_for("owner/large", force=False)
        with pytest.raises(LoadError, match="downloads"):
            find_model_for("owner/large", force=True)


def _only_here(settings: dict[str, Any]) -> str:
    if settings.get("local_files_only"):
        raise huggingface_hub.errors.LocalEntryNotFoundError("not here")
    raise OSError("downloads")
