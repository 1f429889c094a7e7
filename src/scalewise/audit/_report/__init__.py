"""What was found, for a terminal, a browser and other programs."""
