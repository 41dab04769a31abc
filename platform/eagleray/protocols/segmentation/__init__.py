"""Semantic segmentation, fine-tuned on masks."""
