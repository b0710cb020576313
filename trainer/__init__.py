"""PyTorch: executes plans."""
