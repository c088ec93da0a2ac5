"""A chat with a recurrent model that is restarted in the middle of a conversation: what it finds on
disk and in a saved file.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from helpers.hybrid_folders import make_hybrid_folder
from helpers.recurrent_agents import entries_of
from helpers.terminal import reused

from mlx_paged.core.tier import STATES

TWO = ["qwen3_next", pytest.param("mamba2", marks=pytest.mark.slow)]
QUESTIONS = ["My name is Tom. The code of apple is 4821.", "What is my name?"]
LAST = "What is the code of apple?"
FLAGS = ("--kv-cache-bytes", "300blocks", "--max-tokens", "24", "--temp", "0")


@pytest.mark.parametrize("architecture", TWO)
def test_a_saved_conversation_goes_on_with_its_state(talk, tmp_path: Path, architecture: str):
    flags = (*FLAGS, "--model", str(make_hybrid_folder(tmp_path / "model", architecture)))
    file = tmp_path / "talk.json"
    status, through, err = talk(*QUESTIONS, f"/save {file}", LAST, argv=flags)
    assert status == 0
    in_memory = reused(err)[-1]
    said = re.search(r"messages: 4; K/V of (\d+) tokens in talk\.json\.safetensors", err)
    assert said is not None and in_memory > 0 and int(said[1]) == in_memory
    status, again, err = talk(f"/load {file}", LAST, argv=flags)
    assert status == 0 and reused(err) == [in_memory]
    assert "".join(again).strip() and again == through[-len(again) :]


@pytest.mark.parametrize("architecture", TWO)
def test_a_conversation_goes_on_from_the_state_on_disk(talk, tmp_path: Path, architecture: str):
    flags = (*FLAGS, "--model", str(make_hybrid_folder(tmp_path / "model", architecture)))
    file, folder = tmp_path / "talk.json", tmp_path / "kv"
    _, through, err = talk(*QUESTIONS, f"/save {file}", LAST, argv=flags)
    in_memory = reused(err)[-1]
    (tmp_path / "talk.json.safetensors").unlink()
    flags = (*flags, "--cache-dir", str(folder))
    status, _, _ = talk(*QUESTIONS, argv=flags)
    assert status == 0 and any(each.group == STATES for each in entries_of(folder))
    status, again, err = talk(f"/load {file}", LAST, argv=flags)
    assert status == 0 and "".join(again).strip() and again == through[-len(again) :]
    assert reused(err) == [in_memory]
    assert f"prompt tokens reused, {in_memory} of them from disk" in err
    data = json.loads(file.read_text())
    assert len(data["messages"]) == 4
