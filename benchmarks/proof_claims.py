"""The claims of the papers that docs/proof.md decides, and the sweeps that decide them."""

from pathlib import Path
from typing import NamedTuple

RUNS = Path("runs/proof")
KNN, TOP1, SECONDS, JUMP = "knn/top1", "classifier/top1", "wall_seconds", "jump"
CORRESPONDENCE = "correspondence/accuracy"
DAVIS, CAMVID = "davis/J&F", "segmentation/miou"
FRACTIONS = (CORRESPONDENCE,)  # from 0 to 1; the page shows percent
PROTOCOLS = {  # what `eagleray evaluate` gets beside the trial's folder
    "correspondence": "--train data/proof/cifar10/train-{000000..000000}.tar "
    "--test data/proof/cifar10/test-{000000..000001}.tar",
    "davis": "--davis data/proof/DAVIS --split val_more --size 240",
    "segmentation": "--masks data/proof/CamVid --steps 400 --size 96 --width 64 --batch 8 --lr 1e-3",
}


class Pair(NamedTuple):
    """Two settings of a sweep, of which the paper says that the first is better."""

    better: str
    worse: str
    metric: str
    lower: bool = False  # a lower number is better


class Claim(NamedTuple):
    """A claim of a paper and the sweep that decides it."""

    sweep: str
    claim: str  # in our words
    setting: str
    pairs: tuple[Pair, ...]  # that decide it
    differs: tuple[str, ...] = ()  # the keys in which the settings of a pair differ, and no others
    beside: tuple[Pair, ...] = ()  # numbers that are shown and decide nothing
    protocols: tuple[str, ...] = ()  # of `eagleray evaluate`, after the training of each trial
    after: str = ""  # the sweep whose trials this one starts from
    tried: str = ""  # beside this
    seeds: int = 5  # of each setting, fixed before the first trial


def command(claim: Claim) -> str:
    """Return the command that repeats a claim's sweep, or continues it."""
    return f"eagleray tune {claim.sweep} out={RUNS}/{claim.sweep} --max-concurrent 1 --resume"


CIFAR = "ViT of 4 blocks on CIFAR-10, 4-pixel patches (8 x 8 tokens)"


def drloc(share: int) -> Claim:
    """Return the claim about DRLoc with a share of the labels, in percent, on three backbones."""
    text = f"DRLoc: predicting distances between tokens raises accuracy with {share} % of the labels."
    pairs = tuple(Pair(f"{name}_drloc", name, TOP1) for name in ("swin", "cvt", "t2t"))
    setting = "small backbones on CIFAR-10, batches of 128, 390 steps"
    decides, shown = (pairs, ()) if share in (10, 100) else ((), pairs)  # the least and the most
    return Claim(f"proof_drloc_{share}", text, setting, decides, ("method",), shown)


CLAIMS = (  # the most worth per hour first
    Claim(
        "proof_starts",
        "The backbones that proof_regions and proof_byol_regions start from; it compares nothing.",
        "SimCLR, Swin of two stages on CIFAR-10, 25,000 images, 390 steps of 128",
        (),
        protocols=("correspondence",),
    ),
    Claim(
        "proof_regions",
        "EsViT, figure 8: where views alone train a backbone of several stages, the loss on regions raises its "
        "correspondence.",
        "the class EsViT on the Swins of proof_starts, 4 x 4 tokens in the last stage, 195 steps of 128; `right` is "
        "the share of matches with the nearest token of the image",
        (Pair("regions", "views", CORRESPONDENCE),),
        ("method.region_from",),
        (Pair("regions", "views", KNN),),
        ("correspondence",),
        after="proof_starts",
    ),
    Claim(
        "proof_byol_regions",
        "EsViT, section 4.3: on top of BYOL, too, the loss on regions raises kNN accuracy, as softmax (by 4.1 points) "
        "more than as squared distance (1.8).",
        "the class BYOL with regions on the same Swins, 195 steps of 128",
        (Pair("softmax", "byol", KNN), Pair("mse", "byol", KNN), Pair("softmax", "mse", KNN)),
        ("method.region_loss", "method.region_weight"),
        (Pair("softmax", "byol", CORRESPONDENCE), Pair("mse", "byol", CORRESPONDENCE)),
        ("correspondence",),
        after="proof_starts",
    ),
    Claim(
        "proof_frozen",
        "MoCo v3, figure 6: a random patch projection that is not trained has lower gradient spikes at a high rate.",
        f"{CIFAR}, 10,000 images, 156 steps of 64, rate 0.02; the number is the largest gradient norm over its median",
        (Pair("freeze_patch=True", "freeze_patch=False", JUMP, lower=True),),
        ("backbone.freeze_patch",),
        (Pair("freeze_patch=True", "freeze_patch=False", KNN),),
    ),
    Claim(
        "proof_backbones",
        "The backbones that proof_labels starts from; it compares nothing.",
        "8-pixel patches, CIFAR-10 without labels, 780 steps of 128",
        (),
    ),
    Claim(
        "proof_labels",
        "MoCo v3 and DINO: with 2,500 of 50,000 labels, pretraining without labels beats random weights.",
        "ViT of 4 blocks with 8-pixel patches on CIFAR-10, 190 steps of 128; each seed has a pretraining of its own",
        (Pair("mocov3", "scratch", TOP1), Pair("dino", "scratch", TOP1)),
        ("backbone.weights",),
        after="proof_backbones",
    ),
    drloc(10),
    drloc(25),
    drloc(50),
    drloc(100),
    Claim(
        "proof_mocov3",
        "MoCo v3, tables 2 to 5: positions (by 1.6 points), batch norm in heads, predictor and momentum help.",
        f"{CIFAR}, 25,000 images, 195 steps of 128",
        tuple(Pair("whole", arm, KNN) for arm in ("no_positions", "no_norm", "no_predictor", "no_momentum")),
        ("backbone.position", "method.momentum", "method.norm", "method.predictor"),
        tried="without a predictor the loss is lower, too (1.41 and 1.47 in the last twenty steps), so perhaps a "
        "random predictor needs more of them",
    ),
    Claim(
        "proof_rate",
        "MoCo v3, figures 1 and 2: too large a rate costs accuracy without an error of the loss.",
        f"{CIFAR}, 25,000 images, 195 steps of 128",
        (Pair("lr=0.004", "lr=0.016", KNN),),
        ("optim.lr",),
        (Pair("lr=0.004", "lr=0.001", KNN),),
        tried="in seeds 0 to 2 the loss falls at each rate (0.001, 0.004, 0.016), from 2.0 to 1.51, 1.48 and 1.60, "
        "while kNN ends above the untrained backbones (32.0 to 32.6) at the first two, and below them at the third",
    ),
    Claim(
        "proof_curriculum",
        "Curriculum (FastDINOv2, PatchDropout): low resolution or fewer patches first save time.",
        f"{CIFAR}, 7,500 images, 4 epochs in batches of 128",
        (Pair("curriculum", "full", SECONDS, lower=True), Pair("keep", "full", SECONDS, lower=True)),
        ("curriculum",),
        (Pair("curriculum", "full", KNN), Pair("keep", "full", KNN)),
        tried="DINO ends below its untrained backbone (27.8), so only the time says something; the machine took "
        "twice as long on the day of seeds 3 and 4",
    ),
    Claim(
        "proof_frameworks",
        "MoCo v3, table 4: MoCo v3 is ahead of SimCLR, BYOL and SwAV on a ViT.",
        f"{CIFAR}, 25,000 images, 780 steps of 128, on an H100; untrained 32.3, SelfPatch's backbone 31.2",
        tuple(Pair("mocov3", arm, KNN) for arm in ("simclr", "byol", "swav")),
        ("backbone", "method", "optim", "views"),
        tuple(Pair("mocov3", arm, KNN) for arm in ("moby", "byol_regions", "selfpatch_moby")),
        tried="no rates but those of the recipes; with 8-pixel patches SimCLR leads, too ([results](results.md))",
        seeds=3,
    ),
    Claim(
        "proof_patches",
        "SelfPatch: patches that agree with their neighbours raise dense accuracy (table 5: with 4 more than with 1 or "
        "8).",
        "the class SelfPatch on a ViT of 4 blocks, crops of photographs at 64 pixels, 8 x 8 tokens, neighbours within "
        "the picture, 304 steps of 64; J&F of the two sequences of DAVIS that no crop is from, at 240 pixels; mIoU of "
        "Semantic FPN after 400 steps on the 28 frames of CamVid that crops are from",
        (Pair("k4", "views", DAVIS), Pair("k4", "k1", DAVIS), Pair("k4", "k8", DAVIS)),
        ("method.neighbours", "method.patch_weight"),
        (Pair("k4", "views", CAMVID),),
        ("davis", "segmentation"),
        tried="CIFAR-10 in 780 steps, where DINO with the mean of the patches learns little and SelfPatch nothing "
        "([log](log.md)); J&F is 47.9 untrained and 61.5 by colour histograms, so these steps teach little",
    ),
    Claim(
        "proof_spikes",
        "MoCo v3, figure 6, at higher rates: a patch projection that is not trained lowers gradient spikes.",
        "as proof_frozen, at two and a half and five times its rate",
        tuple(
            Pair(f"lr={rate} freeze_patch=True", f"lr={rate} freeze_patch=False", JUMP, lower=True)
            for rate in (0.05, 0.1)
        ),
        ("backbone.freeze_patch",),
        tried="one jump of 61 makes most of a mean, and at these rates every run ends below its untrained backbone "
        "(31 %)",
    ),
)
