"""One step of the second moment, for many matrices."""
