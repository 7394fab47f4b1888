"""Arrays that are divided over a mesh."""
