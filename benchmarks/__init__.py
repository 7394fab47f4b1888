"""Each speed and memory claim as a command that writes JSON and a picture."""
