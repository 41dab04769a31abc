"""Read subsets of ImageNet-1k's classes.

ImageNet-100 was chosen by CMC (Tian et al. 2020, arXiv:1906.05849). ImageNet-10 was chosen by DAC (Chang et al. 2017,
"Deep Adaptive Image Clustering") and is used by Contrastive Clustering (Li et al. 2020, arXiv:2009.09687) and, after
it, by SelfPatch; the repositories of both list the same ten classes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from eagleray.base.errors import UserError
from eagleray.datasets.sources.imagenet import imagenet_1k
from eagleray.datasets.sources.item import Item, Listing, class_labels
from eagleray.datasets.sources.options import PrepareOptions
from eagleray.datasets.sources.source import SourceFiles

IMAGENET_100 = """
n01558993 n01692333 n01729322 n01735189 n01749939 n01773797 n01820546 n01855672 n01978455 n01980166
n01983481 n02009229 n02018207 n02085620 n02086240 n02086910 n02087046 n02089867 n02089973 n02090622
n02091831 n02093428 n02099849 n02100583 n02104029 n02105505 n02106550 n02107142 n02108089 n02109047
n02113799 n02113978 n02114855 n02116738 n02119022 n02123045 n02138441 n02172182 n02231487 n02259212
n02326432 n02396427 n02483362 n02488291 n02701002 n02788148 n02804414 n02859443 n02869837 n02877765
n02974003 n03017168 n03032252 n03062245 n03085013 n03259280 n03379051 n03424325 n03492542 n03494278
n03530642 n03584829 n03594734 n03637318 n03642806 n03764736 n03775546 n03777754 n03785016 n03787032
n03794056 n03837869 n03891251 n03903868 n03930630 n03947888 n04026417 n04067472 n04099969 n04111531
n04127249 n04136333 n04229816 n04238763 n04336792 n04418357 n04429376 n04435653 n04485082 n04493381
n04517823 n04589890 n04592741 n07714571 n07715103 n07753275 n07831146 n07836838 n13037406 n13040303
"""
IMAGENET_10 = """
n02056570 n02085936 n02128757 n02690373 n02692877 n03095699 n04254680 n04285008 n04467665 n07747607
"""
CLASSES = {"imagenet-100": IMAGENET_100.split(), "imagenet-10": IMAGENET_10.split()}


def imagenet_subset(options: PrepareOptions) -> SourceFiles:
    """Find ImageNet-1k in any of its layouts. The subset's classes are numbered in the sorted order of their names."""
    whole = imagenet_1k(options)
    return replace(whole, listing=partial(_listing, options, whole))


def _listing(options: PrepareOptions, source: SourceFiles) -> Listing:
    whole, classes = source.listing(), CLASSES[options.source]
    if missing := sorted(set(classes) - set(whole.classes)):
        few = f"{len(missing)} of {options.source}'s classes are missing: {', '.join(missing[:3])} ..."
        raise UserError(f"{options.origin}: {few}")
    return Listing(_items(whole, classes), classes)


def _items(whole: Listing, classes: Sequence[str]) -> Iterator[Item]:
    labels = class_labels(classes)
    for item in whole.items:
        if item.label >= 0 and whole.classes[item.label] in labels:
            yield item._replace(label=labels[whole.classes[item.label]])
