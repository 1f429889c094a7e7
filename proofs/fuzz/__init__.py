"""Seeded random cases: programs of JAX primitives, malformed files, damaged run folders."""
