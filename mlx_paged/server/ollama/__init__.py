"""Ollama's API. A router uses parts of it, so that importing this imports no MLX."""
