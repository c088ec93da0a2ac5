"""Which requests run in the next step, and with how many tokens each. Pure Python, no arrays."""
