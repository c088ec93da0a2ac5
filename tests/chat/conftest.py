"""Model folders that the tests of the chat talk to."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mlx_paged import demo_model_path


@pytest.fixture
def model_folder(tmp_path: Path) -> Callable[..., Path]:
    """A copy of the demo model in which fields of its JSON files, or whole files, are others."""

    def make(texts: dict[str, str] | None = None, **fields: dict[str, object]) -> Path:
        folder = tmp_path / "model"
        shutil.copytree(demo_model_path(), folder, dirs_exist_ok=True)
        for name, changes in fields.items():
            file = folder / f"{name}.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | changes))
        for name, text in (texts or {}).items():
            (folder / name).write_text(text)
        return folder

    return make


@pytest.fixture
def long_answer(model_folder: Callable[..., Path]) -> list[str]:
    """Arguments for answers that do not end by themselves: to this model an end of turn is a token
    like any other.
    """
    folder = model_folder(
        tokenizer_config={"eos_token": "<|endoftext|>"},
        config={"eos_token_id": 3, "max_position_embeddings": 10**9},
        generation_config={"eos_token_id": 3},
    )
    return ["--model", str(folder)]
