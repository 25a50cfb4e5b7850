"""Compute kernels: C++ on a CPU, oneDNN and FlexAttention."""
