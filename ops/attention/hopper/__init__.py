"""The attention kernel for Hopper, in Gluon."""
