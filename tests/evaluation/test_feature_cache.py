"""Stored features are whole after a power loss, or not there."""

import os
from pathlib import Path

import pytest
import torch

from eagleray.evaluation import feature_cache
from eagleray.protocols.features import LabelledFeatures


def test_features_are_on_the_disk_before_they_have_their_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    flush, named = os.fsync, []

    def fsync(descriptor: int) -> None:
        named.append((Path(os.readlink(f"/proc/self/fd/{descriptor}")), [p.name for p in folder.glob("[!.]*")]))
        flush(descriptor)

    folder = feature_cache.folder()
    monkeypatch.setattr(os, "fsync", fsync)
    features = LabelledFeatures(torch.ones(3, 2), torch.arange(3))
    kinds = ["pooled"]
    for _ in range(2):  # the second time from the cache
        found = feature_cache.cached("b", "d", kinds, how=[], make=lambda _: {"pooled": features}, note=pytest.fail)
        assert torch.equal(found["pooled"].x, features.x)
    [path] = folder.iterdir()
    [(part, before), (parent, after)] = named
    assert part.parent == parent == folder
    assert (before, after) == ([], [path.name])
