"""Propagate object masks through videos by the similarity of patches, and score them."""
