"""The library in a Jupyter kernel: examples/notebook.ipynb runs there, shows progress and can be
interrupted.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pytest

_REASON = "a notebook runs with nbclient and ipykernel, which the extra test brings"
nbclient = pytest.importorskip("nbclient", reason=_REASON)
nbformat = pytest.importorskip("nbformat", reason=_REASON)
pytest.importorskip("ipykernel", reason=_REASON)

NOTEBOOK = Path(__file__).parents[1] / "examples" / "notebook.ipynb"

INTERRUPTED = """
import os, signal

def endless():
    once = iter([True])

    def interrupts(tokens, logits):
        if tokens.size > 20 and next(once, False):
            os.kill(os.getpid(), signal.SIGINT)
        return logits

    return SamplingParams(max_tokens=2000, logits_processors=[interrupts], ignore_eos=True)

llm.generate([prompt_of("Count from 20 to 90.")] * 2, endless())
"""
INTERRUPTED_STREAM = """
processors = endless().logits_processors
for response in stream_generate(
    model, tokenizer, prompt_of("Count from 20 to 90."), 2000, logits_processors=processors
):
    pass
"""
INTERRUPTED_TASK = """
async with AsyncEngine(model, tokenizer, kv_cache_bytes="256M") as engine:
    async for output in engine.generate(prompt_of("Count from 20 to 90."), endless()):
        pass
"""
INTERRUPTS = (INTERRUPTED, INTERRUPTED_STREAM, INTERRUPTED_TASK)
ASKED_AGAIN = """
again = llm.chat(conversations, SamplingParams(max_tokens=40))
stats = llm.stats()
print([a.outputs[0].text for a in again] == [a.outputs[0].text for a in outputs],
      stats.num_running, stats.num_waiting)
"""
WITHOUT_WIDGETS = """
import sys
for name in ("auto", "autonotebook", "notebook"):
    sys.modules.pop(f"tqdm.{name}", None)
for name in [name for name in sys.modules if name.split(".")[0] == "ipywidgets"]:
    sys.modules[name] = None
_ = llm.chat(conversations, SamplingParams(max_tokens=2))
"""


class Client(nbclient.NotebookClient):
    """Counts the messages with text that came of each cell, which cells hold joined."""

    num_texts: ClassVar[Counter[int]] = Counter()

    def output(self, outs: Any, msg: Any, display_id: str, cell_index: int) -> Any:
        self.num_texts[cell_index] += msg["msg_type"] == "stream"
        return super().output(outs, msg, display_id, cell_index)


def printed(cell: Any, stream: str = "stdout") -> str:
    return "".join(each.text for each in cell.outputs if each.get("name") == stream)


@pytest.mark.slow
def test_the_notebook_streams_shows_progress_and_can_be_interrupted(tmp_path, monkeypatch):
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)  # none is kept in the file
    loaded, streamed, batch, together = notebook.cells[1::2]
    added = {}
    for source in (*INTERRUPTS, ASKED_AGAIN, WITHOUT_WIDGETS):
        added[source] = nbformat.v4.new_code_cell(source)
        if source in INTERRUPTS:
            added[source].metadata["tags"] = ["raises-exception"]  # the others run all the same
    notebook.cells += added.values()
    Client(notebook, timeout=600, kernel_name="python3").execute()

    assert loaded.outputs[0].data["text/plain"].startswith("LLM(Engine(demo_model, PagedKVCache(")
    assert printed(streamed) == "20 21 22 23 24 25 26 27 28 29 30"
    assert Client.num_texts[notebook.cells.index(streamed)] > 1
    (bar,) = [each for each in batch.outputs if "data" in each]
    assert "application/vnd.jupyter.widget-view+json" in bar.data
    widgets = notebook.metadata["widgets"]["application/vnd.jupyter.widget-state+json"]["state"]
    texts = [str(each["state"].get("value")) for each in widgets.values()]
    assert any("12/12" in text and "tok/s" in text for text in texts)
    assert "stone? The code of stone is 905. (32 tokens found)" in printed(batch)
    assert printed(together) == "17 + 25 = 42\n5 6 7 8 9 10 11 12\n"
    for source in INTERRUPTS:
        ends = [each.ename for each in added[source].outputs if each.output_type == "error"]
        # The kernel cancels a cell that awaits.
        assert ends == ["CancelledError" if source == INTERRUPTED_TASK else "KeyboardInterrupt"]
    assert printed(added[ASKED_AGAIN]) == "True 0 0\n"
    assert "12/12" in printed(added[WITHOUT_WIDGETS], "stderr")
    assert "ipywidgets" not in printed(added[WITHOUT_WIDGETS], "stderr")
