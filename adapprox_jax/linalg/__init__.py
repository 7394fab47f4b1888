"""Linear algebra of arrays: no optimizer, no parameters."""
