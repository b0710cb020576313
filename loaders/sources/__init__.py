"""One shard format each: read and write."""
