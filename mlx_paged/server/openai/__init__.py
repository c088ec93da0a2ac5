"""OpenAI's endpoints for chat, completions and models, and vLLM's for tokens."""
