"""Tokens from logits: filters, penalties, masks of grammars, log-probabilities."""
