"""Compares two builds of the library: the bits of random calls, and times. See __main__.py."""
