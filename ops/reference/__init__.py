"""Oracles in plain PyTorch: exact attention, and the bit-faithful emulation of every kernel."""
