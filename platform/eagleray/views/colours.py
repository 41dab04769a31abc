"""Means and standard deviations of pixels in [0, 1], by channel, with which a backbone's input is normalised."""

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, of red, green and blue
HALF, QUARTER = 0.5, 0.25  # mean and standard deviation to which the levels of any other channels are scaled


def colours(channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the means and the standard deviations, one per channel, of images with this number of channels."""
    return (MEAN, STD) if channels == len(MEAN) else ((HALF,) * channels, (QUARTER,) * channels)
