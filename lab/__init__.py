"""What produces a number or a picture: run as `python -m lab.NAME` from the repository."""
