"""What keeps answers to a format, and calls to their tools."""
