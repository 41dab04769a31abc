"""Finds files of the Hugging Face Hub in its cache on this machine, or downloads them.

Without a network, this fails within PATIENCE seconds; the Hub's own client would try for a minute."""

import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import Any

from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
from timm.models import PretrainedCfg

from eagleray.base.errors import UserError, one_line
from eagleray.base.threads import begin

FILES = ("model.safetensors", "pytorch_model.bin")  # a repository's weights are in one of these files
PATIENCE = 5.0  # seconds to wait for an answer of the Hub
TOKEN = "set HF_TOKEN to a token that may read it"


def fetch(repository: str, names: Sequence[str] = FILES, *, given: str) -> Path:
    """Return the first of the files `names` that a repository has. `repository` may end with `@` and a revision.

    Raises UserError when the repository has none of them, or the Hub does not answer or wants a token; the message
    begins with `given`, the key and value of a recipe."""
    name, _, revision = repository.partition("@")
    try:
        for file in names:
            if isinstance(known := try_to_load_from_cache(name, file, revision=revision or None), str):
                return Path(known)
        check_network(constants.ENDPOINT, given)
        for file in names:
            try:
                return Path(hf_hub_download(name, file, revision=revision or None, endpoint=constants.ENDPOINT))
            except EntryNotFoundError as e:
                if isinstance(e, LocalEntryNotFoundError):  # this error means that the Hub did not answer
                    raise
    except UserError:
        raise
    except GatedRepoError:
        asked = "the Hub asks who reads this repository: accept its terms there"
        raise UserError(f"{given}: {asked} and {TOKEN}") from None
    except RepositoryNotFoundError:
        raise UserError(f"{given}: the Hub has no such repository, or a private one; {TOKEN}") from None
    except Exception as e:  # libraries raise many errors here, such as for a full disk, a proxy or an unknown name
        raise UserError(f"{given}: cannot be fetched ({type(e).__name__}: {one_line(e)})") from None
    raise UserError(f"{given}: the repository has no {' or '.join(names)}")


def timm_overlay(cfg: PretrainedCfg | None, given: str) -> dict[str, Any]:
    """Return changes to the configuration of timm's pretrained weights, with which timm reads the file from `fetch`.

    The result is empty if timm gets the weights in another way. Raises UserError as `fetch` does."""
    if cfg is None or cfg.file or not cfg.hf_hub_id or cfg.custom_load == "hf":
        return {}
    named = cfg.hf_hub_filename
    file = fetch(cfg.hf_hub_id, (named,) if named else FILES, given=given)
    return {"file": str(file), "custom_load": False}


def check_network(url: str, given: str) -> None:
    """Raises UserError when the server of a URL does not answer within PATIENCE seconds, or HF_HUB_OFFLINE is set."""
    if constants.HF_HUB_OFFLINE:
        raise UserError(f"{given}: not in the Hub's cache on this machine, and HF_HUB_OFFLINE is set")

    def ask() -> str:
        try:
            urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=PATIENCE)
        except urllib.error.HTTPError:
            pass  # an HTTP error is an answer too
        except (OSError, ValueError) as e:
            return one_line(getattr(e, "reason", e))
        return ""

    asked = begin(ask, "hub")  # a DNS look-up has no time limit, and a thread can be abandoned
    wait([asked], PATIENCE)
    if problem := asked.result() if asked.done() else "no answer":
        raise UserError(f"{given}: not in the Hub's cache on this machine, and {url} cannot be reached ({problem})")
