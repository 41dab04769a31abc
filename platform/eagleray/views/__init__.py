"""Random crops and colour operations on images.

Decoded images and the settings of views go in. Crops and normalised batches come out. They depend on the seed, the
epoch and the sample alone.

May import: base, config."""
