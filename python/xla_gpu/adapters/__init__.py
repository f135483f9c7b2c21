"""Plugs the operators into serving projects that take kernels from outside. Each module needs its project."""
