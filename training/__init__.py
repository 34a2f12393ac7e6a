"""What a run of train.py has beside the method: flags, a directory, metrics, a page."""
