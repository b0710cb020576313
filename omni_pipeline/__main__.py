"""``python -m omni_pipeline`` is the ``omni`` command."""

from omni_pipeline.cli.main import main

if __name__ == "__main__":
    main()
