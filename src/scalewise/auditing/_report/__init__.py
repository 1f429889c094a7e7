"""Reports for a terminal, a browser and other programs."""
