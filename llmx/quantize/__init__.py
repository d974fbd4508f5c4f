"""Quantizers: algorithms on matrices, and the driver that streams a model's blocks through them."""
