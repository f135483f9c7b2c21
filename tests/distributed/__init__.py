"""Tests of several devices: CPU devices of one process (JAX_NUM_CPU_DEVICES), and GPUs where there are two or more."""
