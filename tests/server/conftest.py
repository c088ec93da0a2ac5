"""A server on the demo model that all tests of a process share, and clients for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import anthropic
import openai
import pytest
from helpers.agent_models import make_agent_model, pieces_of
from helpers.servers import ScriptedEngine, is_idle, make_service, serving, wait_until

from mlx_paged.server.app import App
from mlx_paged.server.service import Service


@pytest.fixture(scope="session")
def shared_service() -> Iterator[Service]:
    service = make_service()
    with service.engine:
        yield service


@pytest.fixture(scope="session")
def server_url(shared_service: Service) -> Iterator[str]:
    with serving(App(shared_service)) as url:
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


@pytest.fixture(scope="session")
def shared_agent_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = make_agent_model(tmp_path_factory.mktemp("models") / "agent")
    service = make_service(folder)
    with service.engine:
        yield service


@pytest.fixture(scope="session")
def agent_url(shared_agent_service: Service) -> Iterator[str]:
    with serving(App(shared_agent_service)) as url:
        yield url


@dataclass
class AgentServer:
    """A server on a model that reasons and calls tools, and clients for it."""

    service: Service
    url: str
    openai: openai.OpenAI
    anthropic: anthropic.Anthropic

    def script(self, answer: str, *, end: bool = True, pieces: int = 0) -> None:
        """Dictate the next answer.

        Args:
            end: it ends by itself.
            pieces: of how many characters each is encoded for itself: other tokens for the same
                text than those that the tokenizer would choose. Marks are tokens all the same.
        """
        parts = pieces_of(answer, pieces) if pieces else [answer]
        tokenizer = self.service.tokenizer
        tokens = [
            token for part in parts for token in tokenizer.encode(part, add_special_tokens=False)
        ]
        engine = self.service.engine
        assert isinstance(engine, ScriptedEngine)
        engine.scripts.append([*tokens, *([tokenizer.eos_token_id] if end else [])])


@pytest.fixture
def agent(shared_agent_service: Service, agent_url: str) -> Iterator[AgentServer]:
    """When a test is over, nothing may be left of its requests."""
    clients = {"api_key": "none", "max_retries": 0}
    with (
        openai.OpenAI(base_url=f"{agent_url}/v1", **clients) as openai_client,
        anthropic.Anthropic(base_url=agent_url, **clients) as anthropic_client,
    ):
        yield AgentServer(shared_agent_service, agent_url, openai_client, anthropic_client)
    wait_until(lambda: is_idle(shared_agent_service))
    engine = shared_agent_service.engine
    assert isinstance(engine, ScriptedEngine)
    num_left = len(engine.scripts)
    engine.scripts.clear()
    assert num_left == 0, "an answer was dictated, and nobody asked"
