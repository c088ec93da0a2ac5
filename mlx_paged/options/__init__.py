"""What can be asked of an engine and of an answer: options, sampling parameters, their values."""
