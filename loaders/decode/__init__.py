"""Bytes to model-ready arrays, one module per modality. Free of torch: runs in spawned workers."""
