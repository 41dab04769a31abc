"""Pictures of what a backbone sees: attention, components, nearest images."""
