"""Ollama's API."""

from mlx_paged.server.ollama import answers, body, models
from mlx_paged.server.routes import ApiRoute

ROUTES = [
    ApiRoute("/api/version", models.version),
    ApiRoute("/api/tags", models.tags),
    ApiRoute("/api/ps", models.loaded),
    ApiRoute("/api/show", models.show, models.ShowRequest),
    ApiRoute("/api/chat", answers.answer, body.OllamaChatRequest),
    ApiRoute("/api/generate", answers.answer, body.GenerateRequest),
    *(ApiRoute(f"/api/{name}", models.refuse, methods=("POST",)) for name in models.REFUSED),
    ApiRoute("/api/delete", models.refuse, methods=("DELETE",)),
]
