"""The kernels of the row-scaled FP8 backward for Hopper, in Gluon."""
