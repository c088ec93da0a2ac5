"""OpenAI's chat, completions and models endpoints, and vLLM's tokenize and detokenize."""

from mlx_paged.server.openai import answers, chat, completions, model
from mlx_paged.server.routes import ApiRoute

ROUTES = [
    # Also without /v1, for clients whose base URL lacks it.
    *(ApiRoute(path, model.models) for path in ("/v1/models", "/models")),
    *(ApiRoute(path, model.model) for path in ("/v1/models/{name:path}", "/models/{name:path}")),
    ApiRoute("/v1/chat/completions", answers.chat_completions, chat.ChatRequest),
    ApiRoute("/chat/completions", answers.chat_completions, chat.ChatRequest),
    ApiRoute("/v1/completions", completions.completions, completions.CompletionRequest),
    ApiRoute("/v1/load_lora_adapter", model.load_adapter, model.LoadAdapterRequest),
    ApiRoute("/v1/unload_lora_adapter", model.unload_adapter, model.UnloadAdapterRequest),
    ApiRoute("/tokenize", model.tokenize, model.TokenizeRequest),
    ApiRoute("/detokenize", model.detokenize, model.DetokenizeRequest),
]
