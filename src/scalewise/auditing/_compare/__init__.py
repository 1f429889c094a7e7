"""Where two programs, or recordings of their values, part, by how much, and why."""
