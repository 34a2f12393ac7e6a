"""Programs that measure, and one that converts models: `python -m experiments.NAME`."""
