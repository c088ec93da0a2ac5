"""Anthropic's Messages API."""

from mlx_paged.server.anthropic.answers import count_tokens, messages
from mlx_paged.server.anthropic.messages import CountRequest, MessagesRequest
from mlx_paged.server.routes import ApiRoute

ROUTES = [
    ApiRoute("/v1/messages", messages, MessagesRequest),
    ApiRoute("/v1/messages/count_tokens", count_tokens, CountRequest),
]
