"""A server for clients of the APIs of OpenAI and Anthropic: ``mlx-paged serve``."""
