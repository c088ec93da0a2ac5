"""Reads what models answer: where reasoning and calls of tools begin and end is decided here, for
the server, the chat, counts of tokens, grammars and budgets of reasoning. Finds out, too, what a
chat template takes.
"""
