"""The clients, their versions, and what runs them."""

from __future__ import annotations

from dataclasses import dataclass

_SCRIPTED = ("-m", "client_lab.server")


@dataclass(frozen=True)
class Client:
    """One client.

    Args:
        script: in ``python/`` or ``node/``; an agent of Node's is driven by a script of Python.
        packages: of its environment, pinned.
        is_node: whether npm has the packages, and not pip.
        server: arguments of Python that start the server and let it say its address.
    """

    script: str
    packages: tuple[str, ...]
    is_node: bool = False
    server: tuple[str, ...] = _SCRIPTED


CLIENTS = {
    "openai": Client("openai_client.py", ("openai==3.54.0",)),
    "anthropic": Client("anthropic_client.py", ("anthropic==2.12.0",)),
    "ollama": Client("ollama_client.py", ("ollama==0.6.3",)),
    "ollama-js": Client("ollama_client.mjs", ("ollama@0.6.4",), is_node=True),
    # It imports mcp without asking for it.
    "litellm": Client("litellm_client.py", ("litellm==1.106.2", "mcp==2.3.0")),
    "langchain": Client(
        "langchain_client.py",
        ("langchain==1.4.7", "langchain-openai==1.7.3", "langchain-anthropic==1.7.7"),
    ),
    "llama-index": Client("llama_index_client.py", ("llama-index-llms-openai-like==0.8.1",)),
    "instructor": Client("instructor_client.py", ("instructor==1.17.0",)),
    "pydantic-ai": Client("pydantic_ai_client.py", ("pydantic-ai-slim[openai,anthropic]==2.68.0",)),
    "openai-agents": Client("openai_agents_client.py", ("openai-agents==0.24.0",)),
    "vercel-ai": Client(
        "vercel_ai.mjs",
        (
            "ai@6.0.326",
            "@ai-sdk/openai@3.0.141",
            "@ai-sdk/openai-compatible@2.0.92",
            "@ai-sdk/anthropic@3.0.140",
            "zod@4.6.7",
        ),
        is_node=True,
    ),
    "codex": Client("codex_agent.py", ("@openai/codex@0.169.0",), is_node=True),
    "opencode": Client("opencode_agent.py", ("opencode-ai@1.18.33",), is_node=True),
    "retrieval": Client(
        "retrieval_client.py",
        ("openai==3.54.0", "cohere==7.3.1", "langchain-openai==1.7.3"),
        server=(*_SCRIPTED, "--retrieval"),
    ),
    "lm-eval": Client(
        "lm_eval_client.py",
        ("lm-eval[api]==0.4.13", "transformers==5.23.0"),
        server=(*_SCRIPTED, "--demo"),
    ),
}
