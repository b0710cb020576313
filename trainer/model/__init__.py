"""Encoders, LLM and their joining; one architecture part per file."""
