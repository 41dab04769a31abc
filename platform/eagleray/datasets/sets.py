"""The table of all sources that `eagleray prepare` reads: the reader of each in `sources/`, and published facts."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from eagleray.datasets.sources import (
    folder,
    image_lists,
    imagenet,
    matlab_sets,
    openimages,
    parquet,
    pcam,
    raw_pixels,
    ucf101,
    webdataset,
)
from eagleray.datasets.sources.source import OWN, Dataset, PrepareOptions, Source, SourceFiles

IMAGENET = "ImageNet terms of access: non-commercial research and education only"
RESEARCH = "published for research; no formal licence"


def _set(
    find: Callable[[PrepareOptions], SourceFiles],
    facts: Dataset,
    *,
    unlabelled: tuple[str, ...] = (),
    obtain: str,
    contents: str,
    licence: str = RESEARCH,
    options: tuple[str, ...] = (),
) -> Source:
    """Return a source with a data set that recipes name. The arguments are fields of `Source` and `Dataset`, and
    `unlabelled`: splits that can be read, but have no labels and are not in `Dataset.splits`."""
    dataset = replace(facts, obtain=obtain, contents=contents)
    return Source(find, licence, dataset, (*facts.splits, *unlabelled), options)


def _subset(name: str, short: str, splits: Mapping[str, int], chosen: str) -> Source:
    """Return the source of a subset of ImageNet-1k. `chosen` names the papers that use its classes."""
    return _set(
        imagenet.imagenet_subset,
        Dataset(name.replace("imagenet", "ImageNet"), short, len(imagenet.CLASSES[name]), splits),
        obtain="Download ImageNet-1k, of which it is a part",
        contents=f"the files of `imagenet-1k`; the classes are those of {chosen}",
        licence=IMAGENET,
        options=("labels",),
    )


def _domain(title: str, train: int, test: int) -> Source:
    """Return the source of a domain of DomainNet. `train` and `test` are the numbers of images in its splits."""
    name = title.lower()
    return _set(
        image_lists.domainnet,
        Dataset(f"DomainNet {title}", name, image_lists.DOMAIN_CLASSES, {"train": train, "test": test}),
        obtain=f"Download {name}.zip, {name}_train.txt and {name}_test.txt from ai.bu.edu/M3SDA",
        contents=f"`{name}/`, `{name}_train.txt`, `{name}_test.txt`",
        licence="fair use, as its authors state; the images belong to their owners",
    )


SHIPPED: dict[str, Source] = {
    "imagenet-1k": _set(
        imagenet.imagenet_1k,
        Dataset("ImageNet-1k", "in1k", 1000, {"train": 1_281_167, "val": 50_000}),
        unlabelled=("test",),
        obtain="Download ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar and ILSVRC2012_devkit_t12.tar.gz from "
        "image-net.org/download-images",
        contents="[the tars, or class folders](images.md#public-and-large-sets)",
        licence=IMAGENET,
        options=("labels",),
    ),
    "imagenet-22k": Source(imagenet.imagenet_22k, licence=IMAGENET),
    "imagenet-100": _subset("imagenet-100", "in100", {"train": 126_689, "val": 5_000}, "CMC"),
    "imagenet-10": _subset("imagenet-10", "in10", {"train": 13_000, "val": 500}, "DAC and Contrastive Clustering"),
    "openimages": Source(
        openimages.openimages,
        licence="images CC BY 2.0 as their authors state, kept as License in the metadata; annotations CC BY 4.0",
        splits=("train", "validation", "test"),
        options=("images",),
    ),
    "webvision": Source(
        image_lists.webvision,
        licence="WebVision terms: non-commercial research; the images belong to their owners",
        splits=("train", "val", "test"),
    ),
    "cifar-10": _set(
        raw_pixels.cifar_10,
        Dataset("CIFAR-10", "cifar10", 10, {"train": 50_000, "test": 10_000}),
        obtain="Download cifar-10-binary.tar.gz from cs.toronto.edu/~kriz/cifar.html",
        contents="`data_batch_1.bin` ..., `test_batch.bin`, `batches.meta.txt`",
    ),
    "cifar-100": _set(
        raw_pixels.cifar_100,
        Dataset("CIFAR-100", "cifar100", 100, {"train": 50_000, "test": 10_000}),
        obtain="Download cifar-100-binary.tar.gz from cs.toronto.edu/~kriz/cifar.html",
        contents="`train.bin`, `test.bin`, `fine_label_names.txt`",
    ),
    "flowers-102": _set(
        matlab_sets.flowers,
        Dataset("Oxford Flowers-102", "flowers", 102, {"trainval": 2_040, "test": 6_149, "train": 1_020, "val": 1_020}),
        obtain="Download 102flowers.tgz, imagelabels.mat and setid.mat from robots.ox.ac.uk/~vgg/data/flowers/102",
        contents="`jpg/`, `imagelabels.mat`, `setid.mat`",
    ),
    "pets": _set(
        image_lists.pets,
        Dataset("Oxford-IIIT Pets", "pets", 37, {"trainval": 3_680, "test": 3_669}),
        obtain="Download images.tar.gz and annotations.tar.gz from robots.ox.ac.uk/~vgg/data/pets",
        contents="`images/`, `annotations/`",
        licence="CC BY-SA 4.0; the images belong to their owners",
    ),
    "svhn": _set(
        matlab_sets.svhn,
        Dataset("SVHN", "svhn", 10, {"train": 73_257, "test": 26_032}),
        obtain="Download train_32x32.mat and test_32x32.mat from ufldl.stanford.edu/housenumbers",
        contents="`train_32x32.mat`, `test_32x32.mat`",
        licence="non-commercial use only",
    ),
    "food-101": _set(
        image_lists.food_101,
        Dataset("Food-101", "food101k", 101, {"train": 75_750, "test": 25_250}),
        obtain="Download food-101.tar.gz from data.vision.ee.ethz.ch/cvl/datasets_extra/food-101",
        contents="`images/`, `meta/`",
    ),
    "sun397": _set(
        image_lists.sun397,
        Dataset("SUN397", "sun397", 397, {"train": 19_850, "test": 19_850}),
        obtain="Download SUN397.tar.gz and Partitions.zip from vision.princeton.edu/projects/2010/SUN",
        contents="`a/` ... `z/`, `Training_01.txt`, `Testing_01.txt`",
    ),
    "aircraft": _set(
        image_lists.aircraft,
        Dataset(
            "FGVC-Aircraft (variants)",
            "aircraft",
            100,
            {"trainval": 6_667, "test": 3_333, "train": 3_334, "val": 3_333},
        ),
        obtain="Download fgvc-aircraft-2013b.tar.gz from robots.ox.ac.uk/~vgg/data/fgvc-aircraft; use its data/",
        contents="`images/`, `images_variant_*.txt`",
        licence="non-commercial research only",
    ),
    "dtd": _set(
        image_lists.dtd,
        Dataset(
            "Describable Textures (partition 1)",
            "dtd",
            47,
            {"trainval": 3_760, "test": 1_880, "train": 1_880, "val": 1_880},
        ),
        obtain="Download dtd-r1.0.1.tar.gz from robots.ox.ac.uk/~vgg/data/dtd",
        contents="`images/`, `labels/`",
    ),
    "cars": _set(
        matlab_sets.cars,
        Dataset("Stanford Cars", "cars", 196, {"train": 8_144, "test": 8_041}),
        obtain="Download cars_train.tgz, cars_test.tgz, car_devkit.tgz and cars_test_annos_withlabels.mat from "
        "ai.stanford.edu/~jkrause/cars",
        contents="`cars_train/`, `cars_test/`, `devkit/`, `cars_test_annos_withlabels.mat`",
        licence="non-commercial research only",
    ),
    "voc2007": _set(
        image_lists.voc2007,
        Dataset(
            "PASCAL VOC 2007 (classification)",
            "voc2007",
            20,
            {"trainval": 5_011, "test": 4_952, "train": 2_501, "val": 2_510},
        ),
        obtain="Download VOCtrainval_06-Nov-2007.tar and VOCtest_06-Nov-2007.tar from "
        "host.robots.ox.ac.uk/pascal/VOC/voc2007",
        contents="`JPEGImages/`, `ImageSets/Main/`",
        licence="images under the terms of Flickr",
    ),
    "caltech-101": _set(
        folder.caltech_101,
        Dataset("Caltech-101", "caltech101", 102, {"train": 3_060, "test": 6_084}),
        obtain="Download caltech-101.zip from data.caltech.edu; 101_ObjectCategories.tar.gz is in it",
        contents="`101_ObjectCategories/`",
        licence="CC BY 4.0; the images belong to their owners",
    ),
    "mnist": _set(
        raw_pixels.mnist,
        Dataset("MNIST", "mnist60k", 10, {"train": 60_000, "test": 10_000}),
        obtain="Download the four .gz files from yann.lecun.com/exdb/mnist",
        contents="`train-images-idx3-ubyte` and so on, unpacked",
    ),
    "fer2013": _set(
        raw_pixels.fer2013,
        Dataset("FER2013", "fer2013k", 7, {"trainval": 32_298, "test": 3_589, "train": 28_709, "val": 3_589}),
        obtain="Download fer2013.tar.gz from "
        "kaggle.com/c/challenges-in-representation-learning-facial-expression-recognition-challenge",
        contents="`fer2013.csv`",
    ),
    "stl10": _set(
        raw_pixels.stl10,
        Dataset("STL-10", "stl10", 10, {"train": 5_000, "test": 8_000}),
        obtain="Download stl10_binary.tar.gz from cs.stanford.edu/~acoates/stl10",
        contents="`train_X.bin`, `train_y.bin`, `test_X.bin`, `test_y.bin`, `class_names.txt`",
        licence=IMAGENET,
    ),
    "gtsrb": _set(
        image_lists.gtsrb,
        Dataset("GTSRB", "gtsrb", 43, {"train": 26_640, "test": 12_630}),
        obtain="Download GTSRB-Training_fixed.zip, GTSRB_Final_Test_Images.zip and GTSRB_Final_Test_GT.zip from "
        "benchmark.ini.rub.de",
        contents="`Training/`, `Final_Test/Images/`, `GT-final_test.csv`",
    ),
    "pcam": _set(
        pcam.pcam,
        Dataset("PatchCamelyon", "pcam", 2, {"trainval": 294_912, "test": 32_768, "train": 262_144, "val": 32_768}),
        obtain="Download the six files camelyonpatch_level_2_split_*.h5.gz from github.com/basveeling/pcam",
        contents="`camelyonpatch_level_2_split_train_x.h5` and so on, unpacked; needs `eagleray[hdf5]`",
        licence="CC0",
    ),
    "ucf101": _set(
        ucf101.ucf101,
        Dataset("UCF101 (middle frames, split 1)", "ucf101", 101, {"train": 9_537, "test": 3_783}),
        obtain="Download UCF101.rar and UCF101TrainTestSplits-RecognitionTask.zip from crcv.ucf.edu/data/UCF101.php",
        contents="`UCF-101/`, `ucfTrainTestlist/`",
    ),
    "hateful-memes": _set(
        image_lists.hateful_memes,
        Dataset("Hateful Memes", "hateful", 2, {"train": 8_500, "dev": 500}),
        obtain="Download it from hatefulmemeschallenge.com",
        contents="`img/`, `train.jsonl`, `dev.jsonl` or `dev_seen.jsonl`",
        licence="the terms of its challenge: research only",
    ),
    "clipart": _domain("Clipart", 33_525, 14_604),
    "infograph": _domain("Infograph", 36_023, 15_582),
    "painting": _domain("Painting", 50_416, 21_850),
    "quickdraw": _domain("Quickdraw", 120_750, 51_750),
    "real": _domain("Real", 120_906, 52_041),
    "sketch": _domain("Sketch", 48_212, 20_916),
    "coco": Source(
        folder.coco,
        licence="images under the licences of their Flickr authors, annotations CC BY 4.0",
        splits=("train2017", "val2017", "test2017", "unlabeled2017"),
    ),
    "folder": Source(folder.folder, licence=OWN),
    "webdataset": Source(webdataset.webdataset, licence=OWN, options=("where", "columns")),
    "parquet": Source(parquet.parquet, licence=OWN, options=("column",)),
}

# Data sets whose files `eagleray prepare` does not read.
OTHERS = {
    "mnist-small": Dataset("MNIST (2,000 of its test images)", "mnist", 10, {"train": 1_500, "test": 500}),
    "fer2013-small": Dataset("FER2013 (1,400 faces)", "fer2013", 7, {"train": 1_050, "test": 350}),
    "food101-small": Dataset("Food-101 (1,717 images of 64 pixels)", "food101", 101, {"train": 1_212, "test": 505}),
}
