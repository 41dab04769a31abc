"""The mean and the standard deviation by which each channel of a backbone's input, pixels in [0, 1], is normalised."""

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, of red, green and blue
HALF, QUARTER = 0.5, 0.25  # mean and standard deviation to which decoding scales each channel of images other than RGB


def colours(channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the means and the standard deviations, one per channel, of images with this number of channels."""
    return (MEAN, STD) if channels == len(MEAN) else ((HALF,) * channels, (QUARTER,) * channels)
