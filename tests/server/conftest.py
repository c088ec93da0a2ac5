"""A server on the demo model that all tests of a process share, and clients for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import anthropic
import openai
import pytest
from helpers.servers import ScriptedEngine, is_idle, make_service, serving, wait_until

from mlx_paged.server.app import make_app
from mlx_paged.server.service import Service


@pytest.fixture(scope="session")
def shared_service() -> Iterator[Service]:
    service = make_service()
    with service.engine:
        yield service


@pytest.fixture(scope="session")
def server_url(shared_service: Service) -> Iterator[str]:
    with serving(make_app(shared_service)) as url:
        yield url


@pytest.fixture
def service(shared_service: Service) -> Iterator[Service]:
    """The service behind ``server_url``. When a test is over, nothing may be left of it."""
    yield shared_service
    wait_until(lambda: is_idle(shared_service))


@pytest.fixture
def script(service: Service) -> Iterator[Callable[..., None]]:
    """Dictate the answers to the next requests: ``script("first answer", "second", ...)``. Special
    tokens are written as text, and each answer ends with the end of sequence, unless ``end=False``.
    """
    engine = service.engine
    assert isinstance(engine, ScriptedEngine)

    def dictate(*answers: str, end: bool = True) -> None:
        for answer in answers:
            tokens = service.tokenizer.encode(answer, add_special_tokens=False)
            engine.scripts.append([*tokens, *([service.tokenizer.eos_token_id] if end else [])])

    yield dictate
    num_left = len(engine.scripts)
    engine.scripts.clear()
    assert num_left == 0, "an answer was dictated, and nobody asked"


@pytest.fixture
def client(server_url: str, service: Service) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server_url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def anthropic_client(server_url: str, service: Service) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server_url, api_key="none", max_retries=0) as client:
        yield client
