"""What shows how the server is doing: metrics, the page, why a prompt was not cached."""
