"""Low-precision arithmetic for JAX."""
