"""Which blocks of keys a call computes."""
