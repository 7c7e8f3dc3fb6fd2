"""Attention that a model writes out with softmax: read.py, then build.py."""
