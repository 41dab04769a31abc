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


def other(title: str, short: str, classes: int, splits: dict[str, int]) -> Dataset:
    """A set whose own files (HDF5, videos) are not read."""
    return Dataset(title, short, classes, splits, "elsewhere, for prepare folder", "class folders of images")


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
    "food-101": Dataset(
        "Food-101",
        "food101k",
        101,
        {"train": 75_750, "test": 25_250},
        "data.vision.ee.ethz.ch/cvl/datasets_extra/food-101: food-101.tar.gz",
        "images/CLASS/*.jpg, meta/train.txt, meta/test.txt",
    ),
    "sun397": Dataset(
        "SUN397",
        "sun397",
        397,
        {"train": 19_850, "test": 19_850},
        "vision.princeton.edu/projects/2010/SUN: SUN397.tar.gz, Partitions.zip",
        "a/abbey/*.jpg ..., Training_01.txt, Testing_01.txt",
    ),
    "cars": Dataset(
        "Stanford Cars",
        "cars",
        196,
        {"train": 8_144, "test": 8_041},
        "ai.stanford.edu/~jkrause/cars: cars_train.tgz, cars_test.tgz, car_devkit.tgz, cars_test_annos_withlabels.mat",
        "cars_train/*.jpg, cars_test/*.jpg, devkit/cars_train_annos.mat, cars_test_annos_withlabels.mat",
    ),
    "aircraft": Dataset(
        "FGVC-Aircraft, variants",
        "aircraft",
        100,
        {"trainval": 6_667, "test": 3_333, "train": 3_334, "val": 3_333},
        VGG + "fgvc-aircraft: fgvc-aircraft-2013b.tar.gz, its folder data/",
        "images/*.jpg, images_variant_train.txt, images_variant_val.txt, images_variant_trainval.txt, "
        "images_variant_test.txt",
    ),
    "voc2007": Dataset(
        "PASCAL VOC 2007, classification",
        "voc2007",
        20,
        {"trainval": 5_011, "test": 4_952, "train": 2_501, "val": 2_510},
        "host.robots.ox.ac.uk/pascal/VOC/voc2007: VOCtrainval_06-Nov-2007.tar, VOCtest_06-Nov-2007.tar",
        "JPEGImages/*.jpg, ImageSets/Main/CLASS_SPLIT.txt",
    ),
    "dtd": Dataset(
        "Describable Textures, partition 1",
        "dtd",
        47,
        {"trainval": 3_760, "test": 1_880, "train": 1_880, "val": 1_880},
        VGG + "dtd: dtd-r1.0.1.tar.gz",
        "images/CLASS/*.jpg, labels/train1.txt, labels/val1.txt, labels/test1.txt",
    ),
    "caltech-101": Dataset(
        "Caltech-101",
        "caltech101",
        102,
        {"train": 3_060, "test": 6_084},
        "data.caltech.edu: caltech-101.zip, and 101_ObjectCategories.tar.gz in it",
        "101_ObjectCategories/CLASS/*.jpg",
    ),
    "mnist": Dataset(
        "MNIST",
        "mnist60k",
        10,
        {"train": 60_000, "test": 10_000},
        "yann.lecun.com/exdb/mnist: four .gz files",
        "train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte, t10k-labels-idx1-ubyte",
    ),
    "fer2013": Dataset(
        "FER2013",
        "fer2013k",
        7,
        {"trainval": 32_298, "test": 3_589, "train": 28_709, "val": 3_589},
        "kaggle.com/c/challenges-in-representation-learning-facial-expression-recognition-challenge: fer2013.tar.gz",
        "fer2013.csv",
    ),
    "stl10": Dataset(
        "STL-10",
        "stl10",
        10,
        {"train": 5_000, "test": 8_000},
        "cs.stanford.edu/~acoates/stl10: stl10_binary.tar.gz",
        "train_X.bin, train_y.bin, test_X.bin, test_y.bin, class_names.txt",
    ),
    "gtsrb": Dataset(
        "GTSRB",
        "gtsrb",
        43,
        {"train": 26_640, "test": 12_630},
        "benchmark.ini.rub.de: GTSRB-Training_fixed.zip, GTSRB_Final_Test_Images.zip, GTSRB_Final_Test_GT.zip",
        "Training/CLASS/*.ppm, Final_Test/Images/*.ppm, GT-final_test.csv",
    ),
    "hateful-memes": Dataset(
        "Hateful Memes",
        "hateful",
        2,
        {"train": 8_500, "dev": 500},
        "hatefulmemeschallenge.com",
        "img/*.png, train.jsonl, dev.jsonl or dev_seen.jsonl",
    ),
    "pcam": other("PatchCamelyon", "pcam", 2, {"trainval": 294_912, "test": 32_768, "train": 262_144, "val": 32_768}),
    "ucf101": other("UCF101, middle frames, split 1", "ucf101", 101, {"train": 9_537, "test": 3_783}),
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
