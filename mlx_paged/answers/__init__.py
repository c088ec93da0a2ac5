"""What models read and write: chat templates, tool calls and reasoning."""
