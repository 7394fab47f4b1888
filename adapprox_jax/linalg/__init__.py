"""Linear algebra of single arrays: no pytrees, no optimizer."""
