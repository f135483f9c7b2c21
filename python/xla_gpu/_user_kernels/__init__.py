"""Users' kernels: compiled, described and bound to calls, before any framework."""
