"""What was measured, and how: ``python -m benchmarks`` lists it, and runs one by its name."""
