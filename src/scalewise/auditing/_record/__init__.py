"""Recordings of what a device computes, equation by equation, and their comparison."""
