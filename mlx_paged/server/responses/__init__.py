"""OpenAI's ``/v1/responses``."""

from mlx_paged.server.responses import answers, body
from mlx_paged.server.routes import ApiRoute

ROUTES = [
    ApiRoute("/v1/responses", answers.responses, body.ResponsesRequest),
    ApiRoute(
        "/v1/responses/{path:path}", answers.stored_response, methods=("GET", "POST", "DELETE")
    ),
]
