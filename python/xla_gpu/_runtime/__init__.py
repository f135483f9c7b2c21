"""The shared library and the runtimes it is registered with."""
