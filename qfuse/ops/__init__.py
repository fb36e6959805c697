"""One op, one NAME.py and one NAME.metal."""
