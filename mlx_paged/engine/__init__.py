"""What runs a model on a cache, step by step."""
