"""Object detection with Mask R-CNN, fine-tuned on COCO annotations."""
