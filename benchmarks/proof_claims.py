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
    setting: str  # what is trained and measured, in sentences
    pairs: tuple[Pair, ...]  # that decide it
    differs: tuple[str, ...] = ()  # the keys in which the settings of a pair differ, and no others
    beside: tuple[Pair, ...] = ()  # numbers that are shown and decide nothing
    protocols: tuple[str, ...] = ()  # of `eagleray evaluate`, after the training of each trial
    after: str = ""  # the sweep whose trials this one starts from
    note: str = ""  # in sentences
    seeds: int = 5  # of each setting, fixed before the first trial


def command(claim: Claim) -> str:
    """Return the command that repeats a claim's sweep, or continues it."""
    return f"eagleray tune {claim.sweep} out={RUNS}/{claim.sweep} --max-concurrent 1 --resume"


CIFAR = "A ViT with 4 blocks and 4-pixel patches trains on"


def drloc(share: int) -> Claim:
    """Return the claim about DRLoc with a share of the labels, in percent, on three backbones."""
    text = f"Claim (DRLoc): with {share} % of CIFAR-10's labels, predicting distances between tokens raises accuracy."
    pairs = tuple(Pair(f"{name}_drloc", name, TOP1) for name in ("swin", "cvt", "t2t"))
    setting = "Three small backbones train for 390 steps of 128 images."
    decides, shown = (pairs, ()) if share in (10, 100) else ((), pairs)  # the least and the most
    return Claim(f"proof_drloc_{share}", text, setting, decides, ("method",), shown)


CLAIMS = (  # the most worth per hour first
    Claim(
        "proof_starts",
        "This sweep makes no comparison. It trains the Swins from which proof_regions and proof_byol_regions start.",
        "SimCLR trains a Swin with two stages on 25,000 CIFAR-10 images for 390 steps of 128 images.",
        (),
        protocols=("correspondence",),
    ),
    Claim(
        "proof_regions",
        "Claim (EsViT, figure 8): for a backbone with several stages, adding the region loss to the view loss raises "
        "the correspondence accuracy.",
        "EsViT trains the Swins of proof_starts (4 x 4 tokens in the last stage) for 195 more steps of 128 images.",
        (Pair("regions", "views", CORRESPONDENCE),),
        ("method.region_from",),
        (Pair("regions", "views", KNN),),
        ("correspondence",),
        after="proof_starts",
        note="The Swins of proof_starts have correspondence accuracies of 80 to 87. EsViT lowers them with every seed, "
        "and with every seed by less if it has the region loss.",
    ),
    Claim(
        "proof_byol_regions",
        "Claim (EsViT, section 4.3): adding a region loss to BYOL raises kNN accuracy by 4.1 points if it is EsViT's "
        "region loss (a softmax), and by 1.8 points if it is a squared distance.",
        "BYOL, with or without a region loss, trains the Swins of proof_starts for 195 more steps of 128 images.",
        (Pair("softmax", "byol", KNN), Pair("mse", "byol", KNN), Pair("softmax", "mse", KNN)),
        ("method.region_loss", "method.region_weight"),
        (Pair("softmax", "byol", CORRESPONDENCE), Pair("mse", "byol", CORRESPONDENCE)),
        ("correspondence",),
        after="proof_starts",
        note="The correspondence accuracies of the Swins are 80 to 87. They end at 78 to 82 with BYOL alone, and at 25 "
        "to 31 with the squared distance, with which kNN accuracies end at 22 to 28 (27 for an untrained Swin).",
    ),
    Claim(
        "proof_frozen",
        "Claim (MoCo v3, figure 6): at a high learning rate, freezing the random patch projection reduces spikes of "
        "the gradient norm.",
        f"{CIFAR} 10,000 CIFAR-10 images for 156 steps of 64 images, with a learning rate of 0.02. `jump` is the "
        "largest ratio of a step's gradient norm to the median norm of up to 100 steps before it.",
        (Pair("freeze_patch=True", "freeze_patch=False", JUMP, lower=True),),
        ("backbone.freeze_patch",),
        (Pair("freeze_patch=True", "freeze_patch=False", KNN),),
    ),
    Claim(
        "proof_backbones",
        "This sweep makes no comparison. It trains the ViTs from which proof_labels starts.",
        "MoCo v3 and DINO each train a ViT with 8-pixel patches on CIFAR-10 without labels, for 780 steps of 128 "
        "images.",
        (),
    ),
    Claim(
        "proof_labels",
        "Claim (MoCo v3 and DINO): with labels for only 2,500 of 50,000 images, fine-tuning from pretrained weights is "
        "more accurate than training from random weights.",
        "A ViT with 4 blocks and 8-pixel patches trains on CIFAR-10 for 190 steps of 128 images. Each seed starts from "
        "a different pretraining run.",
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
        "Claim (MoCo v3, tables 2 to 5): accuracy is higher with position embeddings (by 1.6 points), with batch norm "
        "in the heads, with a predictor and with a momentum encoder.",
        f"{CIFAR} 25,000 CIFAR-10 images for 195 steps of 128 images.",
        tuple(Pair("whole", arm, KNN) for arm in ("no_positions", "no_norm", "no_predictor", "no_momentum")),
        ("backbone.position", "method.momentum", "method.norm", "method.predictor"),
        note="In the last twenty steps, the loss is 1.41 without a predictor and 1.47 with one.",
    ),
    Claim(
        "proof_rate",
        "Claim (MoCo v3, figures 1 and 2): too high a learning rate lowers accuracy, although training does not "
        "diverge.",
        f"{CIFAR} 25,000 CIFAR-10 images for 195 steps of 128 images.",
        (Pair("lr=0.004", "lr=0.016", KNN),),
        ("optim.lr",),
        (Pair("lr=0.004", "lr=0.001", KNN),),
        note="For seeds 0 to 2, the loss falls from 2.0 to 1.51 at the rate 0.001, to 1.48 at 0.004, and to 1.60 "
        "at 0.016. The kNN accuracy ends above that of the untrained backbones (32.0 to 32.6) at 0.001 and 0.004, and "
        "below it at 0.016.",
    ),
    Claim(
        "proof_curriculum",
        "Claim (FastDINOv2, PatchDropout): starting with a low resolution (`curriculum`) or with fewer patches "
        "(`keep`) saves training time.",
        "DINO trains a ViT with 4 blocks and 4-pixel patches on 7,500 CIFAR-10 images for 4 epochs, with batches of "
        "128 images.",
        (Pair("curriculum", "full", SECONDS, lower=True), Pair("keep", "full", SECONDS, lower=True)),
        ("curriculum",),
        (Pair("curriculum", "full", KNN), Pair("keep", "full", KNN)),
        note="DINO's kNN accuracy ends below that of its untrained backbone (27.8), so only the times are meaningful.",
    ),
    Claim(
        "proof_frameworks",
        "Claim (MoCo v3, table 4): on a ViT, MoCo v3 is more accurate than SimCLR, BYOL and SwAV.",
        f"{CIFAR} 25,000 CIFAR-10 images for 780 steps of 128 images, on an H100. The kNN accuracy of the untrained "
        "backbone is 32.3, or 31.2 for SelfPatch's backbone.",
        tuple(Pair("mocov3", arm, KNN) for arm in ("simclr", "byol", "swav")),
        ("backbone", "method", "optim", "views"),
        tuple(Pair("mocov3", arm, KNN) for arm in ("moby", "byol_regions", "selfpatch_moby")),
        note="For each method, we tried only its recipe's learning rate. SimCLR is also the most accurate with 8-pixel "
        "patches ([results](results.md#methods-on-cifar-10)).",
        seeds=3,
    ),
    Claim(
        "proof_patches",
        "Claim (SelfPatch): training each patch to agree with its neighbours improves segmentation and video "
        "propagation.",
        "SelfPatch trains a ViT with 4 blocks for 304 steps of 64 photograph crops. A crop is 64 pixels wide (8 x 8 "
        "patches), and all neighbours lie within the crop. `davis/J&F` uses two DAVIS sequences at 240 pixels, which "
        "the training crops do not include. `segmentation/miou` is the score of Semantic FPN after 400 steps on "
        "CamVid's 28 training frames.",
        (Pair("patches", "views", DAVIS),),
        ("method.patch_weight",),
        (Pair("patches", "views", CAMVID),),
        ("davis", "segmentation"),
        note="In 780 steps on CIFAR-10, DINO with mean pooling learned little and SelfPatch learned nothing. In "
        "earlier runs, 1, 4 and 8 neighbours did not differ ([log](log.md)). The J&F of the untrained backbone is "
        "47.9, and that of colour histograms is 61.5.",
    ),
    Claim(
        "proof_spikes",
        "Claim (MoCo v3, figure 6): freezing the random patch projection also reduces spikes of the gradient norm at "
        "higher learning rates.",
        "The runs have the settings of proof_frozen, but 2.5 or 5 times its learning rate.",
        tuple(
            Pair(f"lr={rate} freeze_patch=True", f"lr={rate} freeze_patch=False", JUMP, lower=True)
            for rate in (0.05, 0.1)
        ),
        ("backbone.freeze_patch",),
        note="A single run with a `jump` of 60 accounts for most of the mean of 19.10. At these rates, the kNN "
        "accuracy of every run ends below that of the untrained backbone (31 %).",
    ),
)
