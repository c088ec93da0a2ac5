"""The process of one model, while it starts."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from helpers.routers import is_running

from mlx_paged.router.model_process import ModelProcess
from mlx_paged.router.program import setup_arg_parser
from mlx_paged.server.errors import ApiError


def test_a_start_that_is_stopped_or_cancelled_leaves_no_process(tmp_path: Path):
    async def main() -> None:
        flags = {**vars(setup_arg_parser().parse_args([])), "served_model_name": ["demo"]}
        process = ModelProcess("demo", flags, tmp_path / "0")
        pids = []

        async def begin() -> asyncio.Task[None]:
            starting = asyncio.create_task(process.start())
            while process._process is None or process._process.returncode is not None:
                await asyncio.sleep(0.01)
            pids.append(process._process.pid)
            return starting

        starting = await begin()
        assert process.state == "loading"
        assert await process.stop() and process.state == "unloaded"
        with pytest.raises(ApiError, match="the model 'demo' is being unloaded; retry later"):
            await starting
        starting = await begin()
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert process.state == "unloaded" and await process.nbytes() == 0
        assert not any(map(is_running, pids)) and len(set(pids)) == 2

    asyncio.run(main())
