"""OpenAI's chat, completions and models endpoints, and vLLM's tokenize and detokenize."""
