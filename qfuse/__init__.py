"""Fused decode kernels for MLX: a declared graph of ops, with a reference for each."""

__version__ = "0.1.0"
