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
    pairs: tuple[Pair, ...]
    protocols: tuple[str, ...] = ()  # of `eagleray evaluate`, after the training of each trial
    after: str = ""  # the sweep whose trials this one starts from
    tried: str = "nothing else yet"
    confounded: str = ""  # what else than the claim the verdicts may come from


def command(claim: Claim) -> str:
    """Return the command that repeats a claim's sweep, or continues it."""
    return f"eagleray tune {claim.sweep} out={RUNS}/{claim.sweep} --max-concurrent 1 --resume"


CIFAR = "ViT of 4 blocks on CIFAR-10, 4-pixel patches (8 x 8 tokens)"


def drloc(share: int, *more: str) -> Claim:
    """Return the claim about DRLoc with a share of the labels, in percent, on Swin, CvT and more backbones."""
    text = f"DRLoc: predicting distances between tokens raises accuracy with {share} % of the labels."
    pairs = tuple(Pair(f"{name}_drloc", name, TOP1) for name in ("swin", "cvt", *more))
    return Claim(f"proof_drloc_{share}", text, "small backbones on CIFAR-10, batches of 128, 390 steps", pairs)


def labels(sweep: str, images: int, steps: int) -> Claim:
    """Return the claim about backbones that were pretrained before so many images with labels are learned."""
    return Claim(
        sweep,
        f"MoCo v3 and DINO: with {images:,} of 50,000 labels, pretraining without labels beats random weights.",
        f"ViT of 4 blocks with 8-pixel patches on CIFAR-10, {steps} steps of 128",
        (Pair("mocov3", "scratch", TOP1), Pair("dino", "scratch", TOP1)),
        after="proof_backbones",
    )


MATCHES = (
    "of features that have hardly been trained, the best match of a region is the nearest one in the picture for 17 to "
    "18 % of the tokens (6 % by chance), so most targets are of another place; with the true matches the same loss "
    "raised correspondence in a trial of 40 steps, where it fell with those that were found"
)
TORUS = (
    "neighbours are counted over the borders of the picture, which matters on small grids: of 4 x 4 tokens three in "
    "four have neighbours on the other side, and a third of all candidates are there; of 3 x 3 tokens all others are "
    "candidates. On the paper's 14 x 14 tokens it is 4 % of the candidates"
)


CLAIMS = (  # the most worth per hour first
    Claim(
        "proof_frozen",
        "MoCo v3, figure 6: a random patch projection that is not trained has lower gradient spikes at a high rate.",
        f"{CIFAR}, 10,000 images, 156 steps of 64, rate 0.02; the number is the largest gradient norm over its median",
        (
            Pair("freeze_patch=True", "freeze_patch=False", JUMP, lower=True),
            Pair("freeze_patch=True", "freeze_patch=False", KNN),
        ),
    ),
    drloc(25, "t2t")._replace(
        tried="nothing else yet; T2T-ViT gains 1.7 to 6.9 points with each of the five seeds, which differ by as much",
    ),
    Claim(
        "proof_backbones",
        "The backbones that the claims on few labels start from; it compares nothing.",
        "8-pixel patches, CIFAR-10 without labels, 780 steps of 128, one seed",
        (),
        tried="proof_labels starts from these; 1, 10 and 100 % of the labels from ones that were trained again, where "
        "MoCo v3 has 39.8 and DINO the same",
    ),
    labels("proof_labels_1", 516, 200),
    labels("proof_labels", 2500, 190),
    labels("proof_labels_10", 5000, 195),
    labels("proof_labels_100", 50000, 390),
    Claim(
        "proof_regions",
        "EsViT on a ViT, where views alone find correspondence, says the paper: the loss on regions, from the start or "
        "late, over views alone. Its claim is of several stages and comes next.",
        f"{CIFAR}, 12,500 images, 194 steps of 128",
        (Pair("regions", "views", CORRESPONDENCE), Pair("regions_late", "views", CORRESPONDENCE)),
        ("correspondence",),
        tried="no more steps; in these, DINO itself does not begin to learn ([log](log.md))",
        confounded=f"{MATCHES}. The settings differ in `free_scale`, too",
    ),
    Claim(
        "proof_multistage",
        "EsViT, figure 8: where views alone train a backbone of several stages, the loss on regions restores its "
        "correspondence, which a ViT has without it.",
        "Swin of two stages on CIFAR-10, 4 x 4 tokens in the last, 25,000 images; 195, 390 and 780 steps of 128; mIoU "
        "of Semantic FPN as in proof_patches",
        tuple(
            Pair(f"regions epochs={epochs}", f"views epochs={epochs}", metric)
            for epochs in (1, 2, 4)
            for metric in (CORRESPONDENCE, KNN, *((CAMVID,) if epochs == 4 else ()))
        ),
        ("correspondence", "segmentation"),
        tried="three stages and 194 steps; in all of these DINO itself hardly begins to learn (kNN untrained 27.1), so "
        "the trend is that of its first steps: with both losses correspondence falls, from 30.9 untrained "
        "([log](log.md)); 780 steps took 981 s with regions and 807 without, so at equal time views alone have a fifth "
        "more steps, which by the trend costs them less than their lead",
        confounded=f"{MATCHES}. The settings differ in `free_scale`, too",
    ),
    Claim(
        "proof_byol_regions",
        "EsViT, section 4.3: on top of BYOL, too, the loss on regions raises kNN accuracy, as softmax (by 4.1 points) "
        "more than as squared distance (1.8).",
        "the same Swin and images, 390 steps of 128",
        tuple(
            Pair(better, worse, metric)
            for better, worse in (("softmax", "byol"), ("mse", "byol"), ("softmax", "mse"))
            for metric in (KNN, CORRESPONDENCE)
        ),
        ("correspondence",),
        tried="nothing else yet; BYOL alone raises correspondence, from 30.9 untrained. The loss on regions as softmax "
        "falls at first (to 2.3 in 170 steps in seed 0, to 0.8 in 30 in seeds 3 and 4) and ends at 6.1 to 7.1, near "
        "that of uniform outputs (6.9): as DINO's, it has not begun to teach ([log](log.md)). As squared distance it "
        "is 0 from about step 100 on: all regions have one vector",
        confounded=f"{MATCHES}. Unlike EsViT, BYOL with regions does not hold the last layer at first; and as squared "
        "distance, without a predictor or a centre, one vector for all regions is the best solution",
    ),
    Claim(
        "proof_patches",
        "SelfPatch: patches that agree with their neighbours raise dense accuracy over DINO.",
        "ViT of 4 blocks on crops of photographs, 64 pixels, 8 x 8 tokens, 304, 608 and 1,216 steps of 64; "
        "J&F of the two sequences of DAVIS that no crop is from, at 240 pixels; mIoU of Semantic FPN after 400 steps "
        "on the 28 frames of CamVid that crops are from",
        tuple(
            Pair(f"selfpatch epochs={epochs}", f"dino epochs={epochs}", metric)
            for epochs in (8, 16, 32)
            for metric in (DAVIS, CAMVID)
        ),
        ("davis", "segmentation"),
        tried="CIFAR-10 in 780 steps, where DINO with the mean of the patches learns little and SelfPatch nothing "
        "([log](log.md)); J&F is 47.9 untrained and 61.5 by colour histograms, so these steps teach little: with "
        "their number mIoU rises in both methods and J&F falls. Seeds 3 and 4 ran on an H100, but for SelfPatch's "
        "longest, which ran on a CPU again for CamVid. Chance moves the longest trials: DINO's of seed 0 ended with "
        "J&F 44.0 on a CPU, and with 38.9 and 35.5 in two runs on the H100; SelfPatch's of seeds 3 and 4 with 32.4 and "
        "44.6 on a CPU, and with 44.4 and 35.6 on the H100",
        confounded=f"{TORUS}. The small crops have 4 x 4 tokens. DINO has the mean of the patches here, too",
    ),
    Claim(
        "proof_neighbours",
        "SelfPatch, table 5: over DINO at each patch size; large patches want fewer neighbours than small ones.",
        "as proof_patches after 304 steps, with small crops of 48 pixels; patches of 16 and 8 pixels (4 x 4 and 8 x 8 "
        "tokens); k is the number of neighbours",
        tuple(
            Pair(f"p{patch}_{best}", f"p{patch}_{other}", metric)
            for patch, best in ((16, "k2"), (8, "k4"))
            for other in ("dino", "k1", "k8")
            for metric in (DAVIS, CAMVID)
        ),
        ("davis", "segmentation"),
        tried="nothing else; at 16 pixels seed 3 ends at 19 to 23 in J&F with each k, where DINO has 33, though "
        "the loss goes the way of the other seeds'; why, we do not know; at 8 pixels the means of 1, 4 and 8 "
        "neighbours differ by 1.1 points and seeds of one k by 2.6 to 3.8, so in these steps their number hardly "
        "matters; seed 0 untrained: J&F 24.0 at 16 pixels and 47.9 at 8, mIoU 18.3 and 21.2; two settings that "
        "no claim needs are left: k4 at 16 pixels has two seeds, k2 at 8 none",
        confounded=f"{TORUS}. At 16 pixels the small crops have 3 x 3 tokens",
    ),
    Claim(
        "proof_spikes",
        "MoCo v3, figure 6, at higher rates: a patch projection that is not trained lowers gradient spikes.",
        "as proof_frozen, at two and a half and five times its rate",
        tuple(
            Pair(f"lr={rate} freeze_patch=True", f"lr={rate} freeze_patch=False", metric, lower=metric == JUMP)
            for rate in (0.05, 0.1)
            for metric in (JUMP, KNN)
        ),
        tried="nothing else; one jump of 61 makes most of a mean, and at these rates every run ends below its "
        "untrained backbone (31 %)",
    ),
    Claim(
        "proof_mocov3",
        "MoCo v3, tables 2 to 5: positions (by 1.6 points), batch norm in heads, predictor and momentum help.",
        f"{CIFAR}, 25,000 images, 195 steps of 128",
        tuple(Pair("whole", arm, KNN) for arm in ("no_positions", "no_norm", "no_predictor", "no_momentum")),
        tried="no more steps; in these, without a predictor the loss is lower, too (1.41 and 1.47 in the last twenty "
        "steps), so perhaps one that starts from random weights needs more of them",
    ),
    Claim(
        "proof_rate",
        "MoCo v3, figures 1 and 2: too large a rate costs accuracy without an error of the loss.",
        f"{CIFAR}, 25,000 images, 195 steps of 128",
        (Pair("lr=0.004", "lr=0.016", KNN), Pair("lr=0.004", "lr=0.001", KNN)),
        tried="nothing else; in seeds 0 to 2 the loss falls at each rate (0.001, 0.004, 0.016), from 2.0 in the first "
        "ten steps to 1.51, 1.48 and 1.60 in the last twenty, while kNN ends above the untrained backbones (32.0 to "
        "32.6) at the first two, and below them at the third",
    ),
    Claim(
        "proof_frameworks",
        "MoCo v3, table 4: MoCo v3 is ahead of SimCLR, BYOL and SwAV on a ViT. MoBY, BYOL with regions and SelfPatch "
        "on MoBY are shown beside them.",
        f"{CIFAR}, 25,000 images, 780 steps of 128, on an H100; untrained 32.3, SelfPatch's backbone 31.2",
        tuple(Pair("mocov3", arm, KNN) for arm in ("simclr", "byol", "swav", "moby", "byol_regions", "selfpatch_moby")),
        tried="no rates but those of the recipes; with 8-pixel patches SimCLR leads, too ([results](results.md))",
    ),
    Claim(
        "proof_curriculum",
        "Curriculum (FastDINOv2, PatchDropout): low resolution or fewer patches first save time at equal quality.",
        f"{CIFAR}, 7,500 images, 4 epochs in batches of 128",
        tuple(
            pair
            for arm in ("curriculum", "keep")
            for pair in (Pair(arm, "full", SECONDS, lower=True), Pair(arm, "full", KNN))
        ),
        tried="no more steps; in these, DINO ends below its untrained backbone (27.8), so only the time says something"
        "; the machine took twice as long on the day of seeds 3 and 4",
    ),
    drloc(10, "t2t"),
    drloc(50, "t2t"),
    drloc(100, "t2t"),
)
