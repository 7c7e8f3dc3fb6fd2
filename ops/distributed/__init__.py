"""Attention and its keys and values over the GPUs of one or several hosts."""
