"""Requests for more models than have room, in any order, answered by real processes."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
from helpers.fast_lane import mostly_slow
from helpers.several_models import post, residency_of, write_models

from mlx_paged import LLM, SamplingParams
from mlx_paged.router.residency import Residency

MAX_TOKENS = 12


async def watch_memory(residency: Residency, sums: list[int]) -> None:
    """Note the bytes of all processes together, by their own measure, again and again."""
    while True:
        found = [model.process.nbytes() for model in residency.models.values()]
        with suppress(Exception):  # One may be ending.
            sums.append(sum(await asyncio.gather(*found)))
        await asyncio.sleep(0.2)


@pytest.mark.timeout(400)
@mostly_slow(("num_models", "num_requests"), [(3, 9), (10, 100)], quick=(0,))
def test_every_answer_is_that_of_the_model_alone_and_nothing_is_held(
    tmp_path: Path, num_models: int, num_requests: int
):
    rng = random.Random(num_requests)
    models = write_models(tmp_path, [f"m{index}" for index in range(num_models)])
    names = list(models)
    asked = [(rng.choice(names), f"Say {rng.randrange(100)}.") for _ in range(num_requests)]
    num_loads: Counter[str] = Counter()
    sums: list[int] = []

    async def client(residency: Residency, number: int, name: str, prompt: str) -> str | None:
        await asyncio.sleep(rng.random() * num_requests / 5)
        async with residency.use(name) as process:
            num_loads[name, process._process] += 1
            body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "ignore_eos": True}
            task = asyncio.create_task(post(process, "/v1/completions", body))
            if number % 10 == 9:  # It leaves before its answer is complete.
                await asyncio.sleep(0.05)
                task.cancel()
                await asyncio.wait([task])
                return None
            found = await task
            assert found["model"] == name
            return str(found["choices"][0]["text"])

    async def main(sockets: Path) -> list[str | None]:
        residency = residency_of(models, 2, sockets, "--cache-dir", str(tmp_path / "kv"))
        watching = asyncio.create_task(watch_memory(residency, sums))
        clients = (client(residency, number, *each) for number, each in enumerate(asked))
        try:
            answers = await asyncio.gather(*clients)
            assert not any(each.num_users or each.waiting for each in residency.models.values())
            assert not residency._queue and max(sums) <= residency.budget
        finally:
            watching.cancel()
            await residency.close()
        for each in residency.models.values():
            process = each.process._process
            assert each.process.state == "unloaded" and each.process.num_requests == 0
            assert process is None or process.returncode == 0
        return answers

    with tempfile.TemporaryDirectory() as sockets:
        answers = asyncio.run(main(Path(sockets)))
    assert len(num_loads) >= num_models - 1 and len(set(answers)) > 2
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
    for name, path in models.items():
        mine = [number for number, each in enumerate(asked) if each[0] == name]
        with LLM(str(path), num_draft_tokens=0) as alone:
            found = alone.generate([asked[number][1] for number in mine], params)
        for number, output in zip(mine, found, strict=True):
            assert answers[number] in (None, output.outputs[0].text)
    assert answers.count(None) <= num_requests // 10
