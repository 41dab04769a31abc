"""Fine-tune a backbone for object detection on COCO annotations, with Mask R-CNN."""
