"""Fine-tune a backbone for semantic segmentation, and score the predicted class of every pixel."""
