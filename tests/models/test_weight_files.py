"""A model that was just read from its files is hashed once, and every other one each time."""

from __future__ import annotations

import codecs
import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from helpers.block_stores import open_store
from helpers.engine_runs import CONFIG, greedy, livelier_model, make_engine, prompt
from helpers.engine_runs import answer as answer_of
from helpers.mlx_lm_models import LLAMA, random_model, save_adapters
from helpers.qwen3_helpers import save_folder
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers

from mlx_paged import LLM, demo_model_path, load
from mlx_paged.block_store import CacheFolder
from mlx_paged.block_store.directory import make_folder
from mlx_paged.loading.loader import _read_weights, build_model, load_whole, on_our_caches
from mlx_paged.models import identity, language_model, qwen3
from mlx_paged.models.identity import (
    WeightCatalogue,
    array_digests,
    model_identity,
    take_files,
)
from mlx_paged.models.language_model import LanguageModel, WeightFiles

NUM_ARRAYS = len(tree_flatten(livelier_model(CONFIG).parameters()))
KEY, OTHER, DIGEST = "ab" * 32, "cd" * 32, "0123456789abcdef" * 4


@pytest.fixture
def num_hashed(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many pieces were hashed since it was asked last; files settle at once."""
    monkeypatch.setattr(language_model, "SETTLING_SECONDS", 0)
    hashed: list[int] = []
    digest = identity._digest

    def counted(piece: memoryview) -> bytes:
        hashed.append(len(piece))
        return digest(piece)

    def take() -> int:
        count = len(hashed)
        hashed.clear()
        return count

    monkeypatch.setattr(identity, "_digest", counted)
    return take


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = save_folder(tmp_path / "model", livelier_model(CONFIG), CONFIG, num_shards=2)
    tick()
    return made


@pytest.fixture
def catalogue(tmp_path: Path) -> WeightCatalogue:
    return WeightCatalogue(tmp_path / "cache")


def tick() -> None:
    """Longer than the clock of a file system stands still."""
    time.sleep(0.05)


def read(folder: Path, lazy: bool = False) -> LanguageModel:
    """As the loader reads a model for an engine, without a tokenizer."""
    model, config, files = build_model(folder, None)
    if not lazy:
        _read_weights(model, folder)
    ours = on_our_caches(model, config)
    ours.loaded_from = files
    return ours


def digest_of(model: LanguageModel, catalogue: WeightCatalogue) -> str:
    """As an engine with a folder of blocks gets it."""
    return model_identity(model, catalogue, take_files(model)).digest


def names_in(tmp_path: Path) -> list[str]:
    folder = tmp_path / "cache" / "weights"
    return sorted(each.name for each in folder.iterdir()) if folder.exists() else []


def test_the_second_start_hashes_nothing_and_finds_the_same_identity(
    folder: Path, catalogue: WeightCatalogue, num_hashed: Callable[[], int]
) -> None:
    first = digest_of(read(folder), catalogue)
    assert num_hashed() == NUM_ARRAYS
    second = digest_of(read(folder), catalogue)
    assert num_hashed() == 0
    assert first == second == model_identity(read(folder)).digest
    assert num_hashed() == NUM_ARRAYS


def test_the_identity_is_the_one_that_models_had_before_digests_were_kept() -> None:
    """Folders of blocks that exist are still found, and snapshots are still loaded."""
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


def replace_one(model: qwen3.Model) -> None:
    model.model.norm.weight = model.model.norm.weight * 2


def update(model: qwen3.Model) -> None:
    model.update({"model": {"norm": {"weight": model.model.norm.weight * 2}}})


def cast(model: qwen3.Model) -> None:
    model.set_dtype(mx.float16)


def quantise(model: qwen3.Model) -> None:
    nn.quantize(model, group_size=32, bits=8)


def adapt(model: qwen3.Model) -> None:
    parameters = {"rank": 4, "scale": 10.0, "dropout": 0.0, "keys": ["self_attn.q_proj"]}
    linear_to_lora_layers(model, 1, parameters)
    for name, weight in tree_flatten(model.parameters()):
        if name.endswith("lora_b"):
            model.load_weights([(name, mx.ones_like(weight))], strict=False)


def fuse(model: qwen3.Model) -> None:
    adapt(model)
    for layer in model.model.layers:
        if hasattr(layer.self_attn.q_proj, "fuse"):
            layer.self_attn.q_proj = layer.self_attn.q_proj.fuse()


def swap(model: qwen3.Model) -> None:
    """Arrays of the file, and none where it belongs."""
    first, second = (layer.mlp for layer in model.model.layers[:2])
    first.up_proj.weight, second.up_proj.weight = second.up_proj.weight, first.up_proj.weight


@pytest.mark.parametrize(
    "change",
    [change_in_place, add_in_place, replace_one, update, cast, quantise, adapt, fuse, swap],
)
def test_what_a_program_changes_after_it_has_loaded_a_model_counts(
    tmp_path: Path, num_hashed: Callable[[], int], change: Callable[[qwen3.Model], None]
) -> None:
    """No digest of an earlier start is used for a model that a program has in its hands."""
    path = shutil.copytree(demo_model_path(), tmp_path / "model")
    tick()
    catalogue = WeightCatalogue(tmp_path / "cache")
    model, _, _ = load_whole(path)
    before = digest_of(model, catalogue)
    assert digest_of(load_whole(path)[0], catalogue) == before and names_in(tmp_path)
    num_hashed()
    loaded, _ = load(path)
    assert isinstance(loaded, qwen3.Model) and loaded.loaded_from is None
    assert digest_of(loaded, catalogue) == before and num_hashed() > 0
    for changed in (loaded, model):
        change(changed)
        assert digest_of(changed, catalogue) != before and num_hashed() > 0
    # What was changed is not taken for what the files hold.
    assert digest_of(load_whole(path)[0], catalogue) == before and num_hashed() == 0


def test_the_first_engine_of_a_model_takes_its_files() -> None:
    model, _, _ = load_whole(demo_model_path())
    draft, _, _ = load_whole(demo_model_path())
    assert model.loaded_from is not None and draft.loaded_from is not None
    make_engine(model, draft_model=draft)
    assert model.loaded_from is None and draft.loaded_from is None


def test_adapters_and_copies_without_marks_are_not_taken_for_the_files(tmp_path: Path) -> None:
    path = shutil.copytree(demo_model_path(), tmp_path / "demo")
    assert load_whole(path)[0].loaded_from is not None
    model, _ = load(path)
    rank = {"rank": 4, "scale": 10.0, "dropout": 0.0, "keys": ["self_attn.q_proj"]}
    linear_to_lora_layers(model, 1, rank)
    weights = {name: each for name, each in tree_flatten(model.parameters()) if "lora" in name}
    adapters = save_adapters(tmp_path / "adapters", weights, rank)
    assert load_whole(path, adapter_path=adapters)[0].loaded_from is None
    marked = path / "config.json"
    marked.write_bytes(codecs.BOM_UTF8 + marked.read_bytes())
    assert load_whole(path)[0].loaded_from is None


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
    folder: Path, catalogue: WeightCatalogue, num_hashed: Callable[[], int]
) -> None:
    before = digest_of(read(folder), catalogue)
    edit(folder)
    tick()
    num_hashed()
    found = digest_of(read(folder), catalogue)
    assert num_hashed() == NUM_ARRAYS
    assert found == model_identity(read(folder)).digest != before


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("what", ["changed", "replaced", "removed", "beside"])
def test_a_file_that_changes_between_reading_and_hashing_says_nothing(
    folder: Path,
    catalogue: WeightCatalogue,
    num_hashed: Callable[[], int],
    tmp_path: Path,
    what: str,
    lazy: bool,
) -> None:
    before = digest_of(read(folder), catalogue)
    names = names_in(tmp_path)
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
    found = digest_of(model, catalogue)
    assert num_hashed() == NUM_ARRAYS
    assert found == model_identity(model).digest
    # Lazy weights are read after the change.
    assert (found == before) == (what != "changed" or not lazy)
    assert names_in(tmp_path) == names, "nothing was stored"


def test_a_file_that_was_written_a_moment_ago_is_hashed(
    folder: Path,
    catalogue: WeightCatalogue,
    num_hashed: Callable[[], int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(language_model, "SETTLING_SECONDS", 60)
    for _ in range(2):
        digest_of(read(folder), catalogue)
        assert num_hashed() == NUM_ARRAYS
    assert not (tmp_path / "cache").exists()


def test_a_file_from_the_future_is_hashed(
    folder: Path, catalogue: WeightCatalogue, num_hashed: Callable[[], int]
) -> None:
    then = time.time() + 1000
    os.utime(folder / "model-00001-of-00002.safetensors", (then, then))
    tick()
    for _ in range(2):
        digest_of(read(folder), catalogue)
        assert num_hashed() == NUM_ARRAYS


def test_links_are_the_file_and_copies_are_others(
    folder: Path, catalogue: WeightCatalogue, num_hashed: Callable[[], int], tmp_path: Path
) -> None:
    names = [each.name for each in folder.iterdir()]
    expected = digest_of(read(folder), catalogue)
    # A link of another name changes the times of a file; so the hub's snapshots, which are links
    # to its blobs, are found again, and a new hard link is hashed once.
    for kind, link in (("symbolic", os.symlink), ("hard", os.link), ("copy", shutil.copy2)):
        (tmp_path / kind).mkdir()
        for name in sorted(names):
            link(folder / name, tmp_path / kind / name)
        tick()
        num_hashed()
        assert digest_of(read(tmp_path / kind), catalogue) == expected
        assert num_hashed() == (0 if kind == "symbolic" else NUM_ARRAYS)
        assert digest_of(read(tmp_path / kind), catalogue) == expected
        assert num_hashed() == 0


def test_a_truncated_copy_with_the_times_of_the_whole_is_another_file(
    folder: Path, num_hashed: Callable[[], int]
) -> None:
    file = folder / "model-00001-of-00002.safetensors"
    before = WeightFiles.at(folder)
    status = file.stat()
    os.truncate(file, status.st_size - 1)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert WeightFiles.at(folder).key() != before.key()
    assert not before.are_unchanged()


def test_everything_that_the_arrays_depend_on_counts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part of a file's version, the order of files, the configuration and the code."""
    files = WeightFiles.at(folder)
    first, second = files.versions
    keys = {files.key(), files.key("a model"), replace(files, config="{}").key()}
    keys.add(replace(files, versions=(second, first)).key())
    for place in range(len(first)):
        other = (*first[:place], first[place] + 1, *first[place + 1 :])
        keys.add(replace(files, versions=(other, second)).key())
    versions = {"mlx": "1", "mlx-lm": "2"}
    for package in versions:
        monkeypatch.setattr(language_model, "version", {**versions, package: "99"}.get)
        keys.add(files.key())
    assert len(keys) == 4 + 5 + 2
    status = (folder / "model-00001-of-00002.safetensors").stat()
    expected = (
        status.st_dev,
        status.st_ino,
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
    )
    assert expected in files.versions


def test_a_configuration_that_changes_no_array_and_no_module_counts(
    folder: Path, catalogue: WeightCatalogue, num_hashed: Callable[[], int]
) -> None:
    expected = digest_of(read(folder), catalogue)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "a_word": "other"}))
    num_hashed()
    assert digest_of(read(folder), catalogue) == expected
    assert num_hashed() == NUM_ARRAYS


def test_arrays_that_mlx_lm_computes_from_those_of_the_files_are_hashed_once(
    tmp_path: Path, catalogue: WeightCatalogue, num_hashed: Callable[[], int]
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
    num_arrays = len(weights)
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
    for num_expected in (num_arrays, 0):
        digests.append(digest_of(read(folder), catalogue))
        assert num_hashed() == num_expected
    assert digests[0] == digests[1] == model_identity(read(folder)).digest


def test_a_tied_weight_is_hashed_once(num_hashed: Callable[[], int]) -> None:
    weight, other = mx.ones((2, 3)), mx.ones((2, 3))
    digests = array_digests([weight, other, weight])
    assert num_hashed() == 2
    assert digests[0] == digests[1] == digests[2]


def test_views_and_more_bytes_than_are_hashed_at_once_give_the_same_digests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arrays = [mx.arange(n, n + 12).reshape(3, 4).T for n in range(9)] + [mx.array(1), mx.zeros(0)]
    expected = array_digests(arrays)
    monkeypatch.setattr(identity, "WINDOW_NBYTES", 100)
    assert array_digests(arrays) == expected
    assert array_digests([mx.contiguous(each) for each in arrays]) == expected
    assert expected[-1] == b""
    assert len(set(expected)) == len(arrays)


def test_small_arrays_are_hashed_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(4)

    def met(piece: memoryview) -> bytes:
        together.wait(60)
        return bytes(piece[:1])

    monkeypatch.setattr(identity.os, "cpu_count", lambda: 4)
    monkeypatch.setattr(identity, "_digest", met)
    arrays = [mx.array([n], mx.uint8) for n in range(8)]
    assert array_digests(arrays) == [bytes([n]) for n in range(8)]


def test_an_engine_keeps_the_digest_in_its_folder_and_finds_its_blocks_by_it(
    folder: Path, tmp_path: Path, num_hashed: Callable[[], int]
) -> None:
    def answer(model: LanguageModel) -> tuple[int, list[int], int]:
        engine = make_engine(model, cache_dir=tmp_path / "cache")
        output = answer_of(engine, prompt(40), greedy(5))
        assert engine.close(60)
        return output.num_read_tokens, output.outputs[0].token_ids, num_hashed()

    model = read(folder)
    _, tokens, _ = first = answer(model)
    assert first == (0, tokens, NUM_ARRAYS)
    assert answer(read(folder)) == (32, tokens, 0)
    # Another engine of the same model: it may have been written meanwhile.
    assert answer(model) == (32, tokens, NUM_ARRAYS)
    model.lm_head.weight[0, 0] = 1
    assert answer(model)[::2] == (0, NUM_ARRAYS)


def test_an_llm_that_reads_its_model_and_its_draft_model_hashes_each_once(
    tmp_path: Path, num_hashed: Callable[[], int]
) -> None:
    without_head = shutil.ignore_patterns("mtp.safetensors")  # So that it drafts as a model.
    path = shutil.copytree(demo_model_path(), tmp_path / "model", ignore=without_head)
    tick()
    counts = []
    for _ in range(2):
        llm = LLM(path, draft_model=path, cache_dir=tmp_path / "cache")
        counts.append(num_hashed() > 0)
        assert llm.engine.close(60)
    assert counts == [True, False]
    model, tokenizer = load(path)
    LLM(model, tokenizer, cache_dir=tmp_path / "cache").engine.close(60)
    assert num_hashed() > 0


# The catalogue


def test_a_digest_is_found_under_its_key_alone(tmp_path: Path, catalogue: WeightCatalogue) -> None:
    assert catalogue.load(KEY) is None
    assert not (tmp_path / "cache").exists()
    catalogue.store(KEY, DIGEST)
    assert WeightCatalogue(tmp_path / "cache").load(KEY) == DIGEST
    assert catalogue.load(OTHER) is None
    catalogue.store(KEY, OTHER)
    assert catalogue.load(KEY) == OTHER
    assert names_in(tmp_path) == [KEY]


def test_only_their_owner_reads_digests(tmp_path: Path, catalogue: WeightCatalogue) -> None:
    catalogue.store(KEY, DIGEST)
    folder = tmp_path / "cache" / "weights"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / KEY).stat().st_mode & 0o777 == 0o600


def test_a_folder_that_has_digests_is_still_one_of_blocks(
    tmp_path: Path, catalogue: WeightCatalogue
) -> None:
    catalogue.store(KEY, DIGEST)
    (tmp_path / "cache" / "CACHEDIR.TAG").unlink()
    open_store(tmp_path / "cache").close()
    assert CacheFolder(tmp_path / "cache").fingerprints() is not None


@pytest.mark.parametrize(
    "content", [b"", DIGEST[:-1].encode(), b"z" * 64, bytes(range(256)), DIGEST.encode() + b"\n"]
)
def test_a_damaged_file_says_nothing_and_is_written_again(
    tmp_path: Path, catalogue: WeightCatalogue, content: bytes
) -> None:
    catalogue.store(KEY, DIGEST)
    (tmp_path / "cache" / "weights" / KEY).write_bytes(content)
    assert catalogue.load(KEY) is None
    catalogue.store(KEY, DIGEST)
    assert catalogue.load(KEY) == DIGEST


def test_a_link_in_the_place_of_a_file_or_of_the_folder_is_not_followed(
    tmp_path: Path, catalogue: WeightCatalogue
) -> None:
    elsewhere = WeightCatalogue(tmp_path / "elsewhere")
    elsewhere.store(KEY, DIGEST)
    catalogue.store(OTHER, DIGEST)
    os.symlink(tmp_path / "elsewhere" / "weights" / KEY, tmp_path / "cache" / "weights" / KEY)
    assert catalogue.load(KEY) is None
    catalogue.store(KEY, OTHER)
    assert (catalogue.load(KEY), elsewhere.load(KEY)) == (OTHER, DIGEST)
    make_folder(tmp_path / "third")
    os.symlink(tmp_path / "elsewhere" / "weights", tmp_path / "third" / "weights")
    third = WeightCatalogue(tmp_path / "third")
    third.store(OTHER, DIGEST)
    assert third.load(KEY) is None and elsewhere.load(OTHER) is None


def test_a_folder_that_holds_other_things_gets_no_digest(tmp_path: Path) -> None:
    (tmp_path / "letter").write_text("Dear")
    WeightCatalogue(tmp_path).store(KEY, DIGEST)
    assert [each.name for each in tmp_path.iterdir()] == ["letter"]


def test_digests_that_were_not_used_for_long_go(
    tmp_path: Path, catalogue: WeightCatalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "MAX_KNOWN", 3)
    keys, folder = [f"{n:02x}" * 32 for n in range(5)], tmp_path / "cache" / "weights"
    for age, key in enumerate(keys[:3]):
        catalogue.store(key, DIGEST)
        os.utime(folder / key, (1e9 + age, 1e9 + age))
    catalogue.load(keys[0])  # is used now
    (folder / f"{keys[4]}.json").write_text("of an earlier version")
    os.utime(folder / f"{keys[4]}.json", (1e9, 1e9))
    (folder / ".name.999999999-abc-1.tmp").write_text("begun and left")
    (folder / "letter").write_text("Dear")
    catalogue.store(keys[3], DIGEST)
    assert names_in(tmp_path) == [*(keys[n] for n in (0, 2, 3)), "letter"]


def test_writers_and_readers_at_the_same_time_see_whole_files(
    tmp_path: Path, catalogue: WeightCatalogue
) -> None:
    digests = [f"{n:x}" * 64 for n in range(4)]
    catalogue.store(KEY, digests[0])
    seen: list[str | None] = []

    def write(digest: str) -> None:
        for _ in range(20):
            catalogue.store(KEY, digest)

    def look() -> None:
        seen.extend(WeightCatalogue(tmp_path / "cache").load(KEY) for _ in range(50))

    threads = [threading.Thread(target=write, args=[digest]) for digest in digests]
    threads += [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 100
    assert all(digest in digests for digest in seen)
