"""The sets that recipes name, as facts: how many images each split has, its classes, and what is downloaded where.

`eagleray prepare NAME FROM DST --split ...` makes their shards; the first split is the default.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Dataset:
    title: str
    short: str  # in the names of recipes
    classes: int
    splits: dict[str, int]  # images
    obtain: str
    holds: str  # what FROM has in it
    metric: str = "classifier/top1"  # what its published numbers are

    def __str__(self) -> str:
        splits = ", ".join(f"{count:,} {name}" for name, count in self.splits.items())
        return f"{self.title}: {splits}; {self.classes} classes; {self.metric}; from {self.obtain}"


def domain(title: str, train: int, test: int) -> Dataset:
    """One of DomainNet's six."""
    name = title.lower()
    where = f"ai.bu.edu/M3SDA: {name}.zip, {name}_train.txt, {name}_test.txt"
    holds = f"{name}/CLASS/*.jpg, and the two lists"
    return Dataset(f"DomainNet {title}", name, 345, {"train": train, "test": test}, where, holds)


def shards(title: str, short: str, classes: int, train: int, test: int) -> Dataset:
    """A small part of a set, which comes as shards."""
    return Dataset(title, short, classes, {"train": train, "test": test}, "shards, used as they are", "train-*, test-*")


CIFAR = "cs.toronto.edu/~kriz/cifar.html: "
VGG = "robots.ox.ac.uk/~vgg/data/"
IMAGENET = "image-net.org/download-images, as imagenet-1k"
DATASETS = {
    "imagenet-1k": Dataset(
        "ImageNet-1k",
        "in1k",
        1000,
        {"train": 1_281_167, "val": 50_000},
        "image-net.org/download-images: ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar, ILSVRC2012_devkit_t12.tar.gz",
        "the tars, or class folders",
    ),
    "imagenet-100": Dataset(
        "ImageNet-100", "in100", 100, {"train": 126_689, "val": 5_000}, IMAGENET, "what imagenet-1k has"
    ),
    "cifar-10": Dataset(
        "CIFAR-10",
        "cifar10",
        10,
        {"train": 50_000, "test": 10_000},
        CIFAR + "cifar-10-binary.tar.gz",
        "data_batch_1.bin ... data_batch_5.bin, test_batch.bin, batches.meta.txt",
    ),
    "cifar-100": Dataset(
        "CIFAR-100",
        "cifar100",
        100,
        {"train": 50_000, "test": 10_000},
        CIFAR + "cifar-100-binary.tar.gz",
        "train.bin, test.bin, fine_label_names.txt",
    ),
    "flowers-102": Dataset(
        "Oxford Flowers-102",
        "flowers",
        102,
        {"trainval": 2_040, "test": 6_149, "train": 1_020, "val": 1_020},
        VGG + "flowers/102: 102flowers.tgz, imagelabels.mat, setid.mat",
        "jpg/image_*.jpg, imagelabels.mat, setid.mat",
    ),
    "pets": Dataset(
        "Oxford-IIIT Pets",
        "pets",
        37,
        {"trainval": 3_680, "test": 3_669},
        VGG + "pets: images.tar.gz, annotations.tar.gz",
        "images/*.jpg, annotations/trainval.txt, annotations/test.txt",
    ),
    "svhn": Dataset(
        "SVHN",
        "svhn",
        10,
        {"train": 73_257, "test": 26_032},
        "ufldl.stanford.edu/housenumbers: train_32x32.mat, test_32x32.mat",
        "train_32x32.mat, test_32x32.mat",
    ),
    "clipart": domain("Clipart", 33_525, 14_604),
    "infograph": domain("Infograph", 36_023, 15_582),
    "painting": domain("Painting", 50_416, 21_850),
    "quickdraw": domain("Quickdraw", 120_750, 51_750),
    "real": domain("Real", 120_906, 52_041),
    "sketch": domain("Sketch", 48_212, 20_916),
    "mnist-small": shards("MNIST, 2,000 of its test images", "mnist", 10, 1_500, 500),
    "fer2013-small": shards("FER2013, 1,400 faces", "fer2013", 7, 1_050, 350),
    "food101-small": shards("Food-101, 1,717 images of 64 pixels", "food101", 101, 1_212, 505),
}
