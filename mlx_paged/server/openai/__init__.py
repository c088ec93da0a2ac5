"""OpenAI's chat, completions and models endpoints, and vLLM's tokenize and detokenize."""

from mlx_paged.server.openai.answers import chat_completions
from mlx_paged.server.openai.chat import ChatRequest
from mlx_paged.server.openai.completions import CompletionRequest, completions
from mlx_paged.server.openai.model import (
    DetokenizeRequest,
    TokenizeRequest,
    detokenize,
    model,
    models,
    tokenize,
)
from mlx_paged.server.routes import ApiRoute

ROUTES = [
    # Also without /v1, for clients whose base URL lacks it.
    *(ApiRoute(path, models) for path in ("/v1/models", "/models")),
    *(ApiRoute(path, model) for path in ("/v1/models/{name:path}", "/models/{name:path}")),
    ApiRoute("/v1/chat/completions", chat_completions, ChatRequest),
    ApiRoute("/chat/completions", chat_completions, ChatRequest),
    ApiRoute("/v1/completions", completions, CompletionRequest),
    ApiRoute("/tokenize", tokenize, TokenizeRequest),
    ApiRoute("/detokenize", detokenize, DetokenizeRequest),
]
