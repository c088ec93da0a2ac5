"""Draft tokens: who makes them, how many, and which are accepted."""
