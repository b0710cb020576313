"""The ``omni`` command: one file per command group."""
