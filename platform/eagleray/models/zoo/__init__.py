"""Backbones that timm lacks, one file each; importing a file registers its models with timm."""
