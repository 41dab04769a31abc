"""Random crops and colours of images.

Decoded images and a view's settings go in; crops and normalised batches come out, the same for the
same seed and sample.

May import: base, config.
"""
