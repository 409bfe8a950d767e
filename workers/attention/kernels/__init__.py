"""Kernels: attention of one tile, forward and backward, by what the device offers. ``block`` chooses among them."""
