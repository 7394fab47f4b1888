"""What an optimizer state holds: layout, reports, changes of width, conversion from Adam."""
