"""Conversations with models that are put away, killed and loaded again: real processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
from helpers.hybrid_folders import make_hybrid_folder
from helpers.several_models import flags_of, post, residency_of, write_models

from mlx_paged import LLM, SamplingParams
from mlx_paged.loading import demo_model_path
from mlx_paged.router.model_process import ModelProcess, Need
from mlx_paged.router.residency import Residency

MAX_RECOMPUTED = 200  # tokens of a turn's history, at most


class Agent:
    """A conversation that grows by a question, its answer and what a tool said."""

    def __init__(self, residency: Residency, name: str) -> None:
        self.residency, self.name = residency, name
        self.messages: list[dict[str, str]] = [{"role": "user", "content": "Tell me. " * 260}]
        self.num_known = self.num_cached = 0
        self.answers: list[str] = []

    async def turn(self) -> int:
        """Have an answer; returns how many tokens of the history were computed again."""
        async with self.residency.use(self.name) as process:
            body = {"messages": self.messages, "max_tokens": 60}
            found = await post(process, "/v1/chat/completions", body)
        assert found["model"] == self.name
        answer, usage = found["choices"][0]["message"]["content"], found["usage"]
        self.num_cached = usage["prompt_tokens_details"]["cached_tokens"]
        num_again = self.num_known - self.num_cached
        self.num_known = usage["prompt_tokens"] + usage["completion_tokens"]
        self.answers.append(answer)
        self.messages += [
            {"role": "assistant", "content": answer},
            {"role": "user", "content": "It said: a cat, a dog, a house. Go on. " * 8},
        ]
        return num_again


async def num_written_blocks(process: ModelProcess) -> int:
    found: int = json.loads(await process.ask("/v1/cache"))["disk"]["num_written_blocks"]
    return found


def test_an_agents_session_goes_on_after_two_swaps_and_a_kill(tmp_path: Path):
    models = write_models(tmp_path, ["first", "other"])
    kv = tmp_path / "kv"

    async def main(sockets: Path) -> Agent:
        residency = residency_of(models, 1, sockets, "--cache-dir", str(kv))
        agent, other = Agent(residency, "first"), Agent(residency, "other")
        process = residency.models["first"].process
        assert await agent.turn() <= 0
        assert await other.turn() <= 0 and process.state == "unloaded"
        assert await agent.turn() <= MAX_RECOMPUTED  # two swaps later
        assert await process.nbytes() <= residency.budget
        # Blocks are written as they become full: before the process ends, which it does not here.
        num_new = agent.num_known // 16 - agent.num_cached // 16
        async with asyncio.timeout(60):
            while await num_written_blocks(process) < num_new - 1:
                await asyncio.sleep(0.05)
        assert process._process is not None
        os.kill(process._process.pid, signal.SIGKILL)
        async with asyncio.timeout(60):
            while process.state != "failed":
                await asyncio.sleep(0.05)
        assert await agent.turn() <= MAX_RECOMPUTED
        assert agent.num_known > 5 * MAX_RECOMPUTED
        await residency.close()
        return agent

    with tempfile.TemporaryDirectory() as sockets:
        agent = asyncio.run(main(Path(sockets)))
    assert os.stat(kv).st_mode & 0o777 == 0o700
    # The answers are those of the model alone, in one process that computes everything.
    with LLM(str(models["first"]), num_draft_tokens=0) as alone:
        params = SamplingParams(max_tokens=60, temperature=0.0)
        history: list[dict[str, Any]] = []
        for message, answer in zip(agent.messages[::2], agent.answers, strict=False):
            history.append(message)
            assert alone.chat(history, params)[0].outputs[0].text == answer
            history.append({"role": "assistant", "content": answer})


@pytest.mark.slow
def test_recurrent_states_come_back_after_a_swap(tmp_path: Path):
    models = write_models(tmp_path, ["other"])
    models["first"] = make_hybrid_folder(tmp_path / "first", "falcon_h1")

    async def main(sockets: Path) -> None:
        residency = residency_of(models, 1, sockets, "--cache-dir", str(tmp_path / "kv"))
        agent, other = Agent(residency, "first"), Agent(residency, "other")
        await agent.turn()
        await other.turn()
        assert await agent.turn() <= MAX_RECOMPUTED < agent.num_cached
        await residency.close()

    with tempfile.TemporaryDirectory() as sockets:
        asyncio.run(main(Path(sockets)))


def test_needs_are_computed_without_the_weights(tmp_path: Path):
    flags = flags_of(demo_model_path(), "demo", "--kv-cache-bytes", "100blocks")

    async def main() -> None:
        need = await ModelProcess("demo", flags, tmp_path / "unused").measure()
        nbytes = 101 * 16 * 2048
        assert need == Need(4_462_080, need.activations, nbytes, nbytes)
        assert 10**7 < need.activations < 10**9

    asyncio.run(main())
