"""Speed and accuracy, measured. ``python -m bench.attention``, or ``python bench/attention.py``."""
