"""The mean and the standard deviation of the pixels, from 0 to 1, that a backbone expects."""

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's red, green and blue
HALF, QUARTER = 0.5, 0.25  # other channels are scaled to this mean and deviation


def colours(channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and the deviation of each channel of images that have so many."""
    return (MEAN, STD) if channels == len(MEAN) else ((HALF,) * channels, (QUARTER,) * channels)
