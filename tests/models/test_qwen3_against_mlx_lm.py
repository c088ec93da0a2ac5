"""The same weights in mlx-lm's Qwen3 and in ours, alone and in ragged batches: the same logits.

In float32 on the CPU, "the same" is ``float32_tolerance``. For other dtypes and devices the
yardstick is mlx-lm itself: from its float32 logits, ours may be at most twice as far as its own,
plus that tolerance.
"""

import mlx.core as mx
import numpy as np
import pytest
from helpers.fast_lane import mostly_slow
from helpers.qwen3_helpers import (
    CACHES,
    CONFIG,
    SCALINGS,
    all_logits,
    chunks,
    float32_tolerance,
    load_model,
    make_cache,
    max_error,
    random_mlx_lm_model,
    save_folder,
)
from mlx_lm.utils import load_model as load_model_as_mlx_lm
from mlx_lm.utils import quantize_model

from mlx_paged.cache import KVCache, Sequences

LENGTHS = {"one": 1, "short of a block": 15, "a block": 16, "past a block": 17, "long": 45}


def random_prompts(vocab_size, seed=0):
    rng = np.random.default_rng(seed)
    return {name: rng.integers(0, vocab_size, length).tolist() for name, length in LENGTHS.items()}


def ragged_steps(prompts):
    """Prompts that start at different steps in pieces of different sizes; decodes and prefills
    share their steps.
    """
    pieces = {
        "one": chunks(prompts["one"]),
        "short of a block": chunks(prompts["short of a block"], 14),
        "a block": [[], *chunks(prompts["a block"], 8)],
        "past a block": [[], *chunks(prompts["past a block"], 16)],
        "long": chunks(prompts["long"], 20, 1, 9, 14),
    }
    num_steps = max(len(parts) for parts in pieces.values())
    return [
        {seq: parts[i] for seq, parts in pieces.items() if i < len(parts) and parts[i]}
        for i in range(num_steps)
    ]


def assert_same_logits(folder, prompts=None):
    """Ours and mlx-lm's from the same folder, on both caches: alone, in one packed step, and in
    ragged steps.
    """
    theirs, ours = load_model_as_mlx_lm(folder)[0], load_model(folder)
    prompts = prompts or random_prompts(ours.args.vocab_size)

    def their_logits():
        return {
            seq: np.array(theirs(mx.array([ids])).astype(mx.float32))[0]
            for seq, ids in prompts.items()
        }

    rounded = their_logits()
    theirs.set_dtype(mx.float32)
    with mx.stream(mx.cpu):
        exact = their_logits()
    longest = max(len(ids) for ids in prompts.values())
    tolerance = float32_tolerance(ours.args, longest, np.concatenate(list(exact.values())))
    tolerance += 2 * max(max_error(rounded[seq], exact[seq]) for seq in prompts)

    for kind in CACHES:
        seqs = Sequences(make_cache(ours, kind))
        feeds = {"alone": [{seq: ids} for seq, ids in prompts.items()], "packed": [prompts]}
        if prompts.keys() == LENGTHS.keys():
            feeds["ragged"] = ragged_steps(prompts)
        for feed, steps in feeds.items():
            logits = all_logits(ours, seqs, steps)
            assert {seq: len(rows) for seq, rows in logits.items()} == {
                seq: len(ids) for seq, ids in prompts.items()
            }
            for seq in prompts:
                assert max_error(logits[seq], exact[seq]) <= tolerance, (kind, feed, seq)
                seqs.free(seq)


def random_config(seed):
    rng = np.random.default_rng(seed)
    num_kv_heads, group = int(rng.choice([1, 2, 3])), int(rng.choice([1, 2, 4]))
    return {
        **CONFIG,
        "hidden_size": int(rng.choice([24, 32, 40])),
        "intermediate_size": int(rng.choice([17, 48])),
        "num_hidden_layers": int(rng.choice([1, 2, 3])),
        "num_attention_heads": num_kv_heads * group,
        "num_key_value_heads": num_kv_heads,
        "head_dim": int(rng.choice([2, 8, 12, 16])),
        "vocab_size": int(rng.choice([33, 64, 97])),
        "rms_norm_eps": float(rng.choice([1e-6, 1e-5, 1e-2])),
        "rope_theta": float(rng.choice([100.0, 10000.0, 1000000.0])),
        "tie_word_embeddings": bool(rng.choice([True, False])),
    }


def test_the_ragged_steps_mix_decodes_prefills_and_late_arrivals():
    sizes = [
        {seq: len(ids) for seq, ids in step.items()} for step in ragged_steps(random_prompts(64))
    ]
    assert sizes == [
        {"one": 1, "short of a block": 14, "long": 20},
        {"short of a block": 1, "a block": 8, "past a block": 16, "long": 1},
        {"a block": 8, "past a block": 1, "long": 9},
        {"long": 14},
        {"long": 1},
    ]


@mostly_slow("seed", range(8), quick=range(4))
def test_random_configurations_give_the_same_logits(tmp_path, seed):
    config = random_config(seed)
    assert_same_logits(save_folder(tmp_path, random_mlx_lm_model(config, seed), config))


def stored_dtype(cache: KVCache) -> mx.Dtype:
    return cache.layers[0].spec.format.dtype


HALVES = pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=["float16", "bfloat16"])


@HALVES
def test_half_precision_weights_give_the_same_logits(tmp_path, dtype):
    config = {**CONFIG, "tie_word_embeddings": dtype == mx.float16}
    folder = save_folder(tmp_path, random_mlx_lm_model(config, dtype=dtype), config)
    model = load_model(folder)
    assert model.dtype == dtype
    assert [stored_dtype(make_cache(model, kind)) for kind in CACHES] == [dtype, dtype]
    assert_same_logits(folder)


def test_positions_stay_exact_in_bfloat16_beyond_256(tmp_path):
    # bfloat16 counts in steps of 2 from 256 on: a position that went through it would be off by
    # one.
    config = {**CONFIG, "num_hidden_layers": 1}
    folder = save_folder(tmp_path, random_mlx_lm_model(config, dtype=mx.bfloat16), config)
    prompt = np.random.default_rng(0).integers(0, CONFIG["vocab_size"], 290).tolist()
    assert_same_logits(folder, {"long": prompt})


@pytest.mark.parametrize("num_shards", [2, 5])
def test_sharded_weights_give_the_same_logits(tmp_path, num_shards):
    folder = save_folder(tmp_path, random_mlx_lm_model(CONFIG), CONFIG, num_shards)
    assert len(list(folder.glob("model-0000?-of-0000?.safetensors"))) == num_shards
    assert_same_logits(folder)


def test_a_tied_checkpoint_that_also_has_a_head_uses_the_embeddings(tmp_path):
    config = {**CONFIG, "tie_word_embeddings": True}
    head = {"lm_head.weight": mx.ones((config["vocab_size"], config["hidden_size"]))}
    assert_same_logits(
        save_folder(tmp_path, random_mlx_lm_model(config), config, extra_weights=head)
    )


@mostly_slow("written", ["rope_scaling", "rope_parameters", "type"], quick=(1,))
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_rope_scaling_gives_the_same_logits_however_it_is_written(tmp_path, scaling, written):
    config = {**CONFIG, "rope_theta": 500.0}
    if written == "rope_parameters":
        config["rope_parameters"] = {**scaling, "rope_theta": config.pop("rope_theta")}
    elif written == "rope_scaling":
        config["rope_scaling"] = scaling
    else:
        config["rope_scaling"] = {
            "type" if key == "rope_type" else key: value for key, value in scaling.items()
        }
    assert_same_logits(save_folder(tmp_path, random_mlx_lm_model(config), config))


QUANTISABLE = {**CONFIG, "hidden_size": 64, "intermediate_size": 128}  # rows are whole groups of 64


def quantised_folder(folder, config, group_size, bits, dtype=mx.float32, quant_predicate=None):
    model = random_mlx_lm_model(config, dtype=dtype)
    return save_folder(
        folder, *quantize_model(model, config, group_size, bits, quant_predicate=quant_predicate)
    )


@pytest.mark.parametrize("tied", [True, False])
@mostly_slow("group_size", [32, 64])
@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_weights_give_the_same_logits(tmp_path, bits, group_size, tied):
    folder = quantised_folder(
        tmp_path, {**QUANTISABLE, "tie_word_embeddings": tied}, group_size, bits
    )
    layer = load_model(folder).layers[0].self_attn.q_proj
    assert (layer.bits, layer.group_size) == (bits, group_size)
    assert_same_logits(folder)


@HALVES
def test_quantised_weights_keep_their_half_precision(tmp_path, dtype):
    folder = quantised_folder(tmp_path, {**QUANTISABLE, "num_hidden_layers": 1}, 64, 4, dtype)
    model = load_model(folder)
    assert model.dtype == dtype
    assert [stored_dtype(make_cache(model, kind)) for kind in CACHES] == [dtype, dtype]
    assert_same_logits(folder)


def test_weights_quantised_layer_by_layer_give_the_same_logits(tmp_path):
    def predicate(path, _):
        if "layers.0" in path:
            return False
        return {"group_size": 32, "bits": 8} if path.endswith(("lm_head", "down_proj")) else True

    folder = quantised_folder(tmp_path, QUANTISABLE, 64, 4, quant_predicate=predicate)
    model = load_model(folder)
    assert not hasattr(model.layers[0].mlp.down_proj, "bits")
    mlp = model.layers[1].mlp
    assert [layer.bits for layer in (mlp.down_proj, mlp.up_proj, model.lm_head)] == [8, 4, 8]
    assert_same_logits(folder)


def test_quantised_shards_give_the_same_logits(tmp_path):
    model, config = quantize_model(random_mlx_lm_model(QUANTISABLE), QUANTISABLE, 32, 4)
    assert_same_logits(save_folder(tmp_path, model, config, num_shards=3))
