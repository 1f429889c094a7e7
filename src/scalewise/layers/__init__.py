"""Layer norm and RMS norm in one format's arithmetic, as layers of Flax NNX, Linen and Equinox.

Each module imports its library: ``from scalewise.layers.nnx import LayerNorm``. The layers take the
arguments, and have the parameters, of the library's own, so that checkpoints fit; ``arithmetic`` is
one more.
"""
