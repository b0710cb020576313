"""Shared nouns of the project. Imports only the standard library, numpy and pydantic; never torch."""
