"""Trees of parameters: leaves, boxes, views as matrices."""
