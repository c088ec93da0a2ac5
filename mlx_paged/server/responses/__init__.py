"""OpenAI's ``/v1/responses``."""

from mlx_paged.server.responses.answers import responses, stored_response
from mlx_paged.server.responses.body import ResponsesRequest
from mlx_paged.server.routes import ApiRoute

ROUTES = [
    ApiRoute("/v1/responses", responses, ResponsesRequest),
    ApiRoute("/v1/responses/{path:path}", stored_response, methods=("GET", "POST", "DELETE")),
]
