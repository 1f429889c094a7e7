"""Both runs of a program on one tape: arithmetic, kernels, statistics."""
