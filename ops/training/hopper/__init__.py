"""The kernels of the FP8 backward for Hopper, in Gluon."""
