"""Kernels and their torch twins, which are the oracle and the CPU implementation."""
