"""`python -m xla_gpu doctor`: what works here, what does not, why, and what to do."""
