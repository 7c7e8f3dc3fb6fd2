"""Attention whose backward is computed in 8 bits, too."""
