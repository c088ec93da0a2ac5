"""Models for packed input: one model, one file, named as its ``model_type``."""
