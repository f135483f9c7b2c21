"""What an operator is, before any framework: its declaration, attributes, dtypes, checks."""
