"""List licences that have no conditions and the conditions of some others, and infer a file's licence from its name."""

import re

UNKNOWN = "unknown"
# Licences that ask for no more than attribution.
FREE = {"apache-2.0", "mit", "bsd-2-clause", "bsd-3-clause", "cc0", "cc0-1.0", "cc-by-4.0"}
# Conditions of other licences, in short, by the beginnings of their names. Only the text of a licence is binding.
TERMS = {
    "dinov3-license": "which wants copies to stay under it, with its text, and forbids military and nuclear uses",
    "cc-by-nc": "which forbids commercial use",
    "cc-by-sa": "which wants adaptations to stay under it",
    "fair-noncommercial": "which forbids commercial use",
    UNKNOWN: "as nobody has stated it",
}
# Regular expressions of names of published files, with their licences. A name can show that there are conditions, but
# never that there are none, as anybody can rename a file.
FAMILIES = {
    r"dinov3[-_](vit|convnext)[\w-]*[-_]pretrain": "dinov3-license",
    r"mae_(pretrain|finetuned)_vit_\w+\.pth": "cc-by-nc-4.0",
    r"facebook/ijepa_vit": "cc-by-nc-4.0",
}
STATED = re.compile(r"^license(?:_name)?:[ \t]*(\S+)", re.MULTILINE)


def is_free(licence: str) -> bool:
    """Return whether a licence forbids no use, and has no conditions for what is made from the licensed work."""
    return _key(licence) in FREE


def with_terms(licence: str) -> str:
    """Return the name of a licence and, if it is in TERMS, what the licence asks for."""
    terms = next((text for name, text in TERMS.items() if _key(licence).startswith(name)), "")
    return f"{licence}, {terms}" if terms else licence


def by_name(source: str) -> str:
    """Return the licence that the name of a file or repository implies, or UNKNOWN."""
    return next((licence for name, licence in FAMILIES.items() if re.search(name, source)), UNKNOWN)


def in_card(text: str) -> str:
    """Return the licence that a model card of the Hugging Face Hub states at its head, or an empty text."""
    head = text.split("\n---", 1)[0] if text.startswith("---\n") else ""
    return next((name for name in reversed(STATED.findall(head)) if name != "other"), "")


def _key(licence: str) -> str:
    return licence.lower().replace(" ", "-")
