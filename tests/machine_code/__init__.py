"""Compares the machine code of two builds kernel by kernel: `make compare-machine-code BASE=<commit>`."""
