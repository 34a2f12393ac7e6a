"""Programs that make a number or a picture: `python -m experiments.NAME`."""
