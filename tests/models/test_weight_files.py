"""Arrays that the files of a model hold are hashed once, and whatever else there is each time."""

from __future__ import annotations

import gc
import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from helpers.disk_tiers import answer as answer_of
from helpers.engine_helpers import CONFIG, livelier_model
from helpers.engine_runs import greedy, make_engine, prompt
from helpers.mlx_lm_models import LLAMA, random_model
from helpers.qwen3_helpers import save_folder
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load_model

from mlx_paged.block_store import WeightDigests
from mlx_paged.loading.configuration import model_classes
from mlx_paged.loading.loader import _read_weights, build_model
from mlx_paged.models import array_digests, qwen3, weight_files
from mlx_paged.models.identity import model_identity
from mlx_paged.models.weight_files import WeightFiles, noting_classes, untouched

NUM_ARRAYS = len(tree_flatten(livelier_model(CONFIG).parameters()))


@pytest.fixture
def num_hashed(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many pieces were hashed since it was asked last; files settle at once."""
    monkeypatch.setattr(weight_files, "SETTLING_SECONDS", 0)
    hashed: list[int] = []
    digest = array_digests._digest

    def counted(piece: memoryview) -> bytes:
        hashed.append(len(piece))
        return digest(piece)

    def take() -> int:
        count = len(hashed)
        hashed.clear()
        return count

    monkeypatch.setattr(array_digests, "_digest", counted)
    return take


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = save_folder(tmp_path / "model", livelier_model(CONFIG), CONFIG, num_shards=2)
    tick()
    return made


@pytest.fixture
def known(tmp_path: Path) -> WeightDigests:
    return WeightDigests(tmp_path / "cache")


def tick() -> None:
    """Longer than the clock of a file system stands still."""
    time.sleep(0.05)


def read(folder: Path, lazy: bool = False) -> qwen3.Model:
    model, _ = build_model(folder, None)
    if not lazy:
        _read_weights(model, folder)
    assert isinstance(model, qwen3.Model)
    return model


def hashed_whole(model: nn.Module) -> str:
    """The identity by the bytes that lie in memory, and nothing else."""
    origins = dict(weight_files._origins)
    weight_files._origins.clear()
    try:
        return model_identity(model).digest
    finally:
        weight_files._origins.update(origins)


def test_the_second_start_hashes_nothing_and_finds_the_same_identity(
    folder: Path, known: WeightDigests, num_hashed: Callable[[], int]
) -> None:
    first = model_identity(read(folder), known)
    assert num_hashed() == NUM_ARRAYS
    second = model_identity(read(folder), known)
    assert num_hashed() == 0
    model = read(folder)
    assert first == second == model_identity(model)
    assert num_hashed() == NUM_ARRAYS
    assert first.digest == hashed_whole(model)


def test_the_identity_is_the_one_that_models_had_before_digests_were_kept() -> None:
    """Folders of blocks that exist are still found."""
    model = livelier_model(CONFIG)
    weights = [
        (name, (mx.arange(weight.size) % 251).astype(mx.float32).reshape(weight.shape))
        for name, weight in tree_flatten(model.parameters())
    ]
    model.load_weights(weights)
    assert model_identity(model).digest == (
        "40d03987857530ec02c31f408c0c9414c9cc7719bfda1b75f33075b5b4cbe2ac"
    )


def change_in_place(model: qwen3.Model) -> None:
    weight = model.model.embed_tokens.weight
    weight[3, 5] = weight[3, 5] + 1


def add_in_place(model: qwen3.Model) -> None:
    weight = model.model.norm.weight
    weight += 0.5


def replace(model: qwen3.Model) -> None:
    model.lm_head.weight = model.lm_head.weight * 2


def cast(model: qwen3.Model) -> None:
    model.set_dtype(mx.float16)


def quantise(model: qwen3.Model) -> None:
    nn.quantize(model, group_size=32, bits=8)


def adapt(model: qwen3.Model) -> None:
    parameters = {"rank": 4, "scale": 10.0, "dropout": 0.0, "keys": ["self_attn.q_proj"]}
    linear_to_lora_layers(model, 1, parameters)
    name = "model.layers.1.self_attn.q_proj.lora_b"
    model.load_weights([(name, mx.ones((4, 64)))], strict=False)


def fuse(model: qwen3.Model) -> None:
    adapt(model)
    attention = model.model.layers[1].self_attn
    attention.q_proj = attention.q_proj.fuse()


def swap(model: qwen3.Model) -> None:
    """Arrays of the file, and none where it belongs."""
    first, second = (layer.mlp for layer in model.model.layers)
    first.up_proj.weight, second.up_proj.weight = second.up_proj.weight, first.up_proj.weight


@pytest.mark.parametrize(
    ("change", "num_touched"),
    [
        (change_in_place, 1),
        (add_in_place, 1),
        (replace, 1),
        (cast, NUM_ARRAYS),
        (quantise, 3 * 16),
        (adapt, 2),
        (fuse, 1),
        (swap, 0),
    ],
)
def test_what_was_touched_since_it_was_read_is_hashed(
    folder: Path,
    known: WeightDigests,
    num_hashed: Callable[[], int],
    change: Callable[[qwen3.Model], None],
    num_touched: int,
) -> None:
    before = model_identity(read(folder), known).digest
    model = read(folder)
    change(model)
    num_hashed()
    found = model_identity(model, known).digest
    assert num_hashed() == num_touched
    assert found == hashed_whole(model) != before
    # What was touched is not taken for what the files hold.
    assert model_identity(read(folder), known).digest == before


def test_what_is_written_into_an_array_does_not_reach_the_value_that_is_compared(
    folder: Path,
) -> None:
    """MLX writes where the array lies, if nothing else refers to that."""
    model = read(folder)
    mx.eval(model.parameters())
    weight = model.model.norm.weight
    assert id(weight) in untouched([weight])
    weight[0] = 7
    assert untouched([weight]) == {}
    assert weight[0].item() == 7


def test_weights_that_are_dropped_leave_memory(folder: Path) -> None:
    gc.collect()
    mx.clear_cache()  # An array may take a freed buffer that is larger than it.
    num_before, nbytes_before = len(weight_files._origins), mx.get_active_memory()
    model = read(folder)
    nbytes = sum(weight.nbytes for _, weight in tree_flatten(model.parameters()))
    assert len(weight_files._origins) == num_before + NUM_ARRAYS
    assert mx.get_active_memory() - nbytes_before < 1.2 * nbytes
    nn.quantize(model, group_size=32, bits=8)
    mx.eval(model.parameters())
    gc.collect()
    # Only the norms are still those of the file.
    assert len(weight_files._origins) == num_before + NUM_ARRAYS - 16
    assert mx.get_active_memory() - nbytes_before < 0.5 * nbytes
    del model
    gc.collect()
    assert len(weight_files._origins) == num_before


def edit(folder: Path, keep_times: bool = True) -> None:
    """One number of one weight, in place, with the size and the times of before."""
    file = folder / "model-00001-of-00002.safetensors"
    status = file.stat()
    with file.open("r+b") as opened:
        opened.seek(-3, os.SEEK_END)
        byte = opened.read(1)
        opened.seek(-3, os.SEEK_END)
        opened.write(bytes([byte[0] ^ 1]))
    if keep_times:
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_a_file_that_was_changed_in_place_is_hashed(
    folder: Path, known: WeightDigests, num_hashed: Callable[[], int]
) -> None:
    before = model_identity(read(folder), known).digest
    edit(folder)
    tick()
    num_hashed()
    model = read(folder)
    found = model_identity(model, known).digest
    assert num_hashed() == NUM_ARRAYS
    assert found == hashed_whole(model) != before


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("what", ["changed", "replaced", "removed", "beside"])
def test_a_file_that_changes_between_reading_and_hashing_says_nothing(
    folder: Path, known: WeightDigests, num_hashed: Callable[[], int], what: str, lazy: bool
) -> None:
    before = model_identity(read(folder), known).digest
    model = read(folder, lazy)
    num_hashed()
    file = folder / "model-00002-of-00002.safetensors"
    if what == "changed":
        edit(folder)
    elif what == "replaced":
        shutil.copy(file, folder / "new")
        os.replace(folder / "new", file)
    elif what == "removed":
        file.unlink()
    else:
        mx.save_safetensors(str(folder / "model-extra.safetensors"), {"a": mx.zeros(1)})
    found = model_identity(model, known).digest
    assert num_hashed() == NUM_ARRAYS
    assert found == hashed_whole(model)
    # Lazy weights are read after the change.
    assert (found == before) == (what != "changed" or not lazy)
    assert len(list((known._layout.folder / "weights").iterdir())) == 1, "nothing was stored"


def test_a_file_that_was_written_a_moment_ago_is_hashed(
    folder: Path,
    known: WeightDigests,
    num_hashed: Callable[[], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weight_files, "SETTLING_SECONDS", 60)
    for _ in range(2):
        model_identity(read(folder), known)
        assert num_hashed() == NUM_ARRAYS
    assert not known._layout.folder.exists()


def test_a_file_from_the_future_is_hashed(
    folder: Path, known: WeightDigests, num_hashed: Callable[[], int]
) -> None:
    then = time.time() + 1000
    os.utime(folder / "model-00001-of-00002.safetensors", (then, then))
    tick()
    for _ in range(2):
        model_identity(read(folder), known)
        assert num_hashed() == NUM_ARRAYS


def test_links_are_the_file_and_copies_are_others(
    folder: Path, known: WeightDigests, num_hashed: Callable[[], int], tmp_path: Path
) -> None:
    names = [each.name for each in folder.iterdir()]
    expected = model_identity(read(folder), known).digest
    # A link of another name changes the times of a file; so the hub's snapshots, which are links
    # to its blobs, are found again, and a new hard link is hashed once.
    for kind, link in (("symbolic", os.symlink), ("hard", os.link), ("copy", shutil.copy2)):
        (tmp_path / kind).mkdir()
        for name in sorted(names):
            link(folder / name, tmp_path / kind / name)
        tick()
        num_hashed()
        assert model_identity(read(tmp_path / kind), known).digest == expected
        assert num_hashed() == (0 if kind == "symbolic" else NUM_ARRAYS)
        assert model_identity(read(tmp_path / kind), known).digest == expected
        assert num_hashed() == 0


def test_a_truncated_copy_with_the_times_of_the_whole_is_another_file(
    folder: Path, num_hashed: Callable[[], int]
) -> None:
    file = folder / "model-00001-of-00002.safetensors"
    before = WeightFiles.at(folder)
    status = file.stat()
    os.truncate(file, status.st_size - 1)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert WeightFiles.at(folder).key != before.key
    assert not before.are_unchanged()


def test_each_part_of_a_version_and_the_version_of_mlx_count(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = WeightFiles.at(folder)
    first, second = files.versions
    keys = {
        WeightFiles(folder, (first._replace(**{name: value + 1}), second), True).key
        for name, value in first._asdict().items()
    }
    keys |= {files.key, WeightFiles(folder, (second, first), True).key}
    monkeypatch.setattr(weight_files, "version", lambda _: "99")
    keys.add(files.key)
    assert len(keys) == len(first) + 3


def test_arrays_that_mlx_lm_computes_from_those_of_the_files_are_hashed(
    tmp_path: Path, known: WeightDigests, num_hashed: Callable[[], int]
) -> None:
    """Experts that are stacked when they are read, beside weights that are as they were."""
    config = {
        **LLAMA,
        "model_type": "mixtral",
        "num_hidden_layers": 1,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
    model = random_model(config)
    weights = dict(tree_flatten(model.parameters()))
    stacked = [name for name in weights if "switch_mlp" in name]
    assert len(stacked) == 3
    parts = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    for name in stacked:
        base, part = name.removesuffix(".weight").split("switch_mlp.")
        for index, expert in enumerate(weights.pop(name)):
            weights[f"{base}experts.{index}.{parts[part]}.weight"] = expert
    folder = tmp_path / "experts"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    tick()
    digests = []
    for num_expected in (len(weights) - 4 * 3 + 3, 3):
        read_model, _ = load_model(folder, get_model_classes=noting_classes(folder, model_classes))
        arrays = [weight for _, weight in tree_flatten(read_model.parameters())]
        digests.append(array_digests.array_digests(arrays, known))
        assert num_hashed() == num_expected
    assert digests[0] == digests[1]


def test_a_tied_weight_is_hashed_once(
    tmp_path: Path, known: WeightDigests, num_hashed: Callable[[], int]
) -> None:
    weight, other = mx.ones((2, 3)), mx.ones((2, 3))
    digests = array_digests.array_digests([weight, other, weight], known)
    assert num_hashed() == 2
    assert digests[0] == digests[1] == digests[2]


def test_views_and_more_bytes_than_are_hashed_at_once_give_the_same_digests(
    known: WeightDigests, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = [mx.arange(n, n + 12).reshape(3, 4).T for n in range(9)] + [mx.array(1), mx.zeros(0)]
    expected = array_digests.array_digests(arrays, known)
    monkeypatch.setattr(array_digests, "WINDOW_NBYTES", 100)
    assert array_digests.array_digests(arrays, known) == expected
    assert array_digests.array_digests([mx.contiguous(each) for each in arrays], known) == expected
    assert expected[-1] == b""
    assert len(set(expected)) == len(arrays)


def test_small_arrays_are_hashed_side_by_side(
    known: WeightDigests, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = threading.Barrier(4)

    def met(piece: memoryview) -> bytes:
        together.wait(60)
        return bytes(piece[:1])

    monkeypatch.setattr(array_digests.os, "cpu_count", lambda: 4)
    monkeypatch.setattr(array_digests, "_digest", met)
    arrays = [mx.array([n], mx.uint8) for n in range(8)]
    assert array_digests.array_digests(arrays, known) == [bytes([n]) for n in range(8)]


def test_an_engine_keeps_digests_in_its_folder_and_finds_its_blocks_by_them(
    folder: Path, tmp_path: Path, num_hashed: Callable[[], int]
) -> None:
    def answer(model: qwen3.Model) -> tuple[int, list[int], int]:
        engine = make_engine(model, cache_dir=tmp_path / "cache")
        output = answer_of(engine, prompt(40), greedy(5))
        assert engine.close(60)
        return output.num_read_tokens, output.outputs[0].token_ids, num_hashed()

    _, tokens, _ = first = answer(read(folder))
    assert first == (0, tokens, NUM_ARRAYS)
    assert answer(read(folder)) == (32, tokens, 0)
    changed = read(folder)
    changed.lm_head.weight[0, 0] = 1
    assert answer(changed)[::2] == (0, 1)


def test_models_that_are_read_at_the_same_time_are_noted_each(
    folder: Path, tmp_path: Path, num_hashed: Callable[[], int]
) -> None:
    other = save_folder(tmp_path / "other", livelier_model(CONFIG, seed=6), CONFIG)
    tick()
    found: dict[Path, set[tuple[Path, str]]] = {}

    def work(path: Path) -> None:
        model = read(path)
        arrays = [weight for _, weight in tree_flatten(model.parameters())]
        found[path] = {(files.folder, name) for files, name in untouched(arrays).values()}
        mx.clear_streams()

    threads = [threading.Thread(target=work, args=[path]) for path in (folder, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    names = [name for name, _ in tree_flatten(livelier_model(CONFIG).parameters())]
    assert found == {path: {(path, name) for name in names} for path in (folder, other)}
