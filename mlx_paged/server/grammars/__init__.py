"""Grammars that enforce the format of answers and the schemas of tools."""
