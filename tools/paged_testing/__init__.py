"""What the tests and the benchmarks share: the Metal backend on the emulator, and the soak."""
