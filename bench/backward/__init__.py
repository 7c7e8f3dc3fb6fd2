"""A row-scaled FP8 backward for Hopper: kernels in Gluon that the library does not use yet."""
