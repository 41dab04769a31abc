"""Eagleray pretrains vision transformers without labels, straight from WebDataset shards."""

__version__ = "0.1.0"
