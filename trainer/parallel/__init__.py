"""Meshes, sharding and the exchanges between ranks."""
