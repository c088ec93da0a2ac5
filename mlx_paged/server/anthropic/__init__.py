"""Anthropic's Messages API."""

from mlx_paged.server.anthropic import answers, messages
from mlx_paged.server.routes import ApiRoute

ROUTES = [
    ApiRoute("/v1/messages", answers.messages, messages.MessagesRequest),
    ApiRoute("/v1/messages/count_tokens", answers.count_tokens, messages.CountRequest),
]
