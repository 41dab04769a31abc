"""One file for every paper: how it learns from views of images.

A backbone and the method's recipe section go in; each batch gives a loss.

May import: base, config, data, losses, models, views.
"""
