"""K/V that leave the pool and return: blocks in a tier, snapshots."""
