"""Random cases by hypothesis: programs of JAX primitives, malformed files, wrong arguments."""
