"""The demo: generated media whose content is the answer, and the run that learns to read it."""
