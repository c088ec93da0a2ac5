"""Parses answers as they are generated, and keeps them for the next turn."""
