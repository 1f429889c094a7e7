"""The smallest program that shows a finding, as a file of plain JAX."""
