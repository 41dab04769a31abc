"""Draw attention maps, principal components, nearest images and matching patches of a backbone."""
