"""Shards to decoded, mixed, packed batches on this rank."""
