"""Published methods by their names, which train.py and eval.py load when asked for."""
