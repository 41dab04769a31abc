"""Random crops and colour operations on images.

Decoded images and the settings of views go in; crops and normalised batches come out, the same for the same seed, epoch
and sample.

May import: base, config.
"""
