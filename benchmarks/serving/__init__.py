"""Many requests at once, through the engine and over HTTP."""
