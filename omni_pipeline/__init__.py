"""Omni Pipeline: the vocabulary (``core``), the wiring (``app``) and the commands (``cli``).

Imports nothing, so that ``omni_pipeline.core`` loads without the rest.
"""

__version__ = "0.1.0"
