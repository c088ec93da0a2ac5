"""Make the golden logits of transformers' Qwen3 anew, in ``tests/golden/qwen3/<case>/``.

Needs torch, which only the ``dev`` extra brings (``pip install -e '.[dev]'``); the files are
committed, and they are all that the ordinary tests read::

    python tests/golden/make_qwen3_logits.py

A case is a folder: ``config.json``, ``model.safetensors`` (weights under their Hugging Face names)
and ``golden.safetensors`` (``token_ids [num_tokens]``, ``logits [num_tokens, vocab_size]``:
transformers' own, float32, eager attention). Same seeds, same files, up to the last bits of torch's
arithmetic.
"""

from __future__ import annotations

import json
import shutil
from copy import deepcopy
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

NUM_TOKENS = 40
GOLDEN = Path(__file__).parent / "qwen3"

BASE = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}

# How a config.json says its RoPE: transformers 5 nests all under rope_parameters; before, it lay at
# the top level.
NESTED = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
TOP_LEVEL = {"rope_theta": 10000.0, "rope_scaling": None}
# The ramp between interpolated and kept frequencies lies inside head_dim / 2 = 8 for both of these.
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
YARN_BETAS = {
    **YARN,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 4,
    "beta_slow": 1,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

CASES = {
    "mha_untied": {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 6,  # hidden_size / num_attention_heads
        "tie_word_embeddings": False,
        **NESTED,
    },
    "gqa_tied": {**TOP_LEVEL, "rope_theta": 1000000.0},
    "gqa_untied": {
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "vocab_size": 97,
        "rms_norm_eps": 1e-3,
        "tie_word_embeddings": False,
        **TOP_LEVEL,
    },
    "mqa_untied": {
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
    "narrow_heads_tied": {"hidden_size": 48, "intermediate_size": 32, "head_dim": 8, **NESTED},
    "yarn_nested": {"rope_parameters": {**YARN, "rope_theta": 10000.0}},
    "yarn_top_level": {"rope_theta": 100.0, "rope_scaling": YARN_BETAS},
    "linear_nested": {
        "rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 10000.0}
    },
    "linear_top_level": {"rope_theta": 100.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama3_nested": {"rope_parameters": {**LLAMA3, "rope_theta": 100.0}},
}


def main() -> None:
    shutil.rmtree(GOLDEN, ignore_errors=True)
    for seed, (name, fields) in enumerate(CASES.items()):
        make_case(GOLDEN / name, {**BASE, **fields}, seed)
    nbytes = sum(file.stat().st_size for file in GOLDEN.rglob("*") if file.is_file())
    print(f"{len(CASES)} cases, {nbytes / 1e3:.0f} kB in {GOLDEN}")


def make_case(folder: Path, fields: dict, seed: int) -> None:
    folder.mkdir(parents=True)
    # transformers writes into the dicts that it is given.
    model = (
        Qwen3ForCausalLM(Qwen3Config(**deepcopy(fields), attn_implementation="eager"))
        .float()
        .eval()
    )
    if "rope_parameters" in fields:
        model.config.save_pretrained(folder)
    else:
        config = {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "torch_dtype": "float32",
            **fields,
        }
        (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    generator = torch.Generator().manual_seed(seed)
    randomise(model, generator)
    token_ids = torch.randint(fields["vocab_size"], (NUM_TOKENS,), generator=generator)
    with torch.no_grad():
        logits = model(token_ids[None], use_cache=False).logits[0]

    weights = {key: tensor.contiguous() for key, tensor in model.state_dict().items()}
    if fields["tie_word_embeddings"]:
        weights.pop("lm_head.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(
        {"token_ids": token_ids.int(), "logits": logits.contiguous()}, folder / "golden.safetensors"
    )
    print(f"{folder.name}: logits within {logits.min():.1f}..{logits.max():.1f}")


@torch.no_grad()
def randomise(model: Qwen3ForCausalLM, generator: torch.Generator) -> None:
    """Weights at which every part shows: norms far from 1, attention far from uniform, layers above
    embeddings.
    """
    for name, weight in model.named_parameters():
        if name.endswith("norm.weight"):
            weight.uniform_(0.5, 2.0, generator=generator)
        elif "embed_tokens" in name:
            weight.normal_(std=0.3, generator=generator)
        else:
            weight.normal_(std=weight.shape[1] ** -0.5, generator=generator)


if __name__ == "__main__":
    main()
