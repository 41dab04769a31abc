"""One file for every kind of source: how its images and labels are listed and read."""
