"""Write shards with every defect and oddity of real ones, from drawn pictures."""

import tarfile
import zlib
from pathlib import Path

import numpy as np
from helpers.pictures import Member, encode, jpeg, picture, sample, write_tar
from PIL import Image

# Key and reason of each sample of `bad-000000.tar` that the index rejects, in the order of the file.
INDEXED = [
    ("bad_zero", "the image has no bytes"),
    ("miss_image", "no image: only cls"),
]
# Key of each sample that cannot be decoded, with a part of the reason.
DECODED = {
    "bad_cut_at_90": "truncated",
    "bad_cut_at_10": "truncated",
    "bad_header_only": "the JPEG ends inside its header",
    "bad_magic": "cannot identify image file",
    "bad_text": "cannot identify image file",
    "bad_checksum": "data stream",
    "bad_bomb": "pixels",
}
# Number of complete samples in the shards that are cut off.
WHOLE = {"trunc-000000.tar": 10, "trunc-000001.tar": 5}


def members() -> list[Member]:
    """Make the members of `bad-000000.tar`: `bad_` must be rejected, `odd_` used; `miss_` lack a part."""
    large = encode(picture(1, 90, 120))
    png = bytearray(encode(picture(2, 40, 40), "PNG"))
    png[len(png) // 2] ^= 1
    image, gray = Image.fromarray(picture(3, 40, 50)), Image.fromarray(picture(3, 40, 50)).convert("L")
    exif = Image.Exif()
    exif[0x112] = 6
    deep = Image.fromarray(np.linspace(0, 65535, 2000).astype(np.uint16).reshape(40, 50))
    pictures: list[Member] = [
        ("bad_cut_at_90.jpg", large[: len(large) * 9 // 10]),
        ("bad_cut_at_10.jpg", large[: len(large) // 10]),
        ("bad_header_only.jpg", large[:20]),
        ("bad_zero.jpg", b""),
        ("odd_label_empty.jpg", jpeg(1)),
        ("bad_magic.jpg", b"\0\0" + large[2:]),
        ("odd_png.jpg", encode(image, "PNG")),
        ("odd_webp.jpg", encode(image, "WEBP")),
        ("odd_gif.jpg", encode(image.quantize(16), "GIF", save_all=True, append_images=[gray.quantize(16)])),
        ("odd_cmyk.jpg", encode(image.convert("CMYK"))),
        ("odd_gray.jpg", encode(gray)),
        ("odd_progressive.jpg", encode(image, progressive=True)),
        ("odd_16bit.png", encode(deep, "PNG")),
        ("odd_palette.png", encode(image.quantize(16), "PNG", transparency=b"\x00\x80\xff")),
        ("odd_la.png", encode(gray.convert("LA"), "PNG")),
        ("odd_1bit.png", encode(gray.convert("1"), "PNG")),
        ("odd_exif.jpg", encode(image, exif=exif.tobytes())),
        ("odd_1x1.png", encode(picture(4, 1, 1), "PNG")),
        ("odd_20000x20.png", encode(picture(5, 20, 20_000), "PNG")),
        ("odd_20x20000.jpg", encode(picture(6, 20_000, 20))),
        ("bad_bomb.png", bomb()),
        ("bad_text.jpg", b"<html><body>404 not found</body></html>"),
        ("bad_checksum.png", bytes(png)),
        ("odd_label_text.jpg", jpeg(2)),
        ("odd_label_negative.jpg", jpeg(3)),
        ("odd_label_blanks.jpg", jpeg(4)),
    ]
    labels = {"empty": b"", "text": b"cat", "negative": b"-1", "blanks": b" 7 \n"}
    out: list[Member] = []
    for name, data in pictures:
        key = name.partition(".")[0]
        label = next((text for end, text in labels.items() if key.endswith(f"label_{end}")), b"3")
        out += [(name, data), (f"{key}.cls", label)]
    out += [("miss_label.jpg", jpeg(5)), ("miss_image.cls", b"3")]
    out += [("twice.jpg", jpeg(6)), ("twice.cls", b"1"), ("ünï_日本_😀.jpg", jpeg(7)), ("ünï_日本_😀.cls", b"2")]
    out += [("twice.jpg", jpeg(8)), ("twice.cls", b"5"), ("key.with.dots.jpg", jpeg(9)), ("key.cls", b"6")]
    return [*out, ("dir a/sub/UPPER.JPG", jpeg(10)), ("dir a/sub/UPPER.cls", b"8"), *sample(0)]


def bomb() -> bytes:
    """Make a small PNG whose header says that it is 30,000 pixels high and wide."""
    data = encode(picture(7, 8, 8), "PNG")
    header = data[12:16] + (30_000).to_bytes(4) * 2 + data[24:29]
    return data[:12] + header + zlib.crc32(header).to_bytes(4) + data[33:]


def write(folder: Path) -> Path:
    write_tar(folder / "bad-000000.tar", members())
    (folder / "empty-000000.tar").touch()
    write_tar(folder / "nomembers-000000.tar", [])
    (folder / "notatar-000000.tar").write_bytes(b"This is not a tar. " * 80)
    for name, whole in WHOLE.items():
        path = write_tar(folder / name, [m for k in range(whole + 1) for m in sample(k)])
        keep = 512 + len(jpeg(whole)) // 2 if name == "trunc-000000.tar" else 200  # of the image or header
        path.write_bytes(path.read_bytes()[: start(path, whole) + keep])
    return folder


def start(path: Path, key: int) -> int:
    """Return the offset of a sample's first member in a shard."""
    with tarfile.open(path) as tar:
        return tar.getmember(sample(key)[0][0]).offset
