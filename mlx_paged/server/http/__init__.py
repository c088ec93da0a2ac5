"""Everything between a connection and an endpoint: keys, limits, logs, bodies, events."""
