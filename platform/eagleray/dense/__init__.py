"""Evaluation protocols that predict something for every pixel, patch or frame: detection, segmentation and video.

A backbone and folders of annotated images or frames go in; named numbers and pictures come out.

May import: base, config, data, engine, models, protocols, storage, views."""
