"""Connections, middleware, request bodies and server-sent events."""
