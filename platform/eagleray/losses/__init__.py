"""Losses that several methods share or that are worth a kernel of their own.

Tensors go in, scalars come out; a loss has no parameters.

May import: base, models.
"""
