"""List and read the images and labels of each kind of source, with one module for each kind."""
