"""What one step costs: kernels, the host around them, and models of other kinds."""
