"""The attention kernels, what they take and which of them runs."""
