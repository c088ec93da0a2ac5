"""What benchmarks share; nothing here imports one of them."""
