"""What an image takes to decode is read from its header, and refused where its bytes do not account for it."""

import io
import random
import struct
import zlib
from typing import Any

import pytest
from helpers.fuzzing import counts, examples, generators
from helpers.pictures import encode, picture
from helpers.tiffs import tiff
from PIL import Image, ImageFile, PngImagePlugin

from eagleray.data import costs
from eagleray.data.costs import BadImage, check_jpeg
from eagleray.data.decode import decode
from eagleray.data.pixels import image_extensions, read_pixels


@pytest.fixture
def undecoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """All decoders fail the test."""
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda self: pytest.fail("decoded"))
    for decoder in ("decode_jpeg", "simplejpeg.decode_jpeg"):
        monkeypatch.setattr(f"eagleray.data.decode.{decoder}", lambda *args, **options: pytest.fail("decoded"))


def refused(data: bytes) -> str:
    """The reason why an image is refused, which is the same wherever it is decoded."""
    reasons = []
    for read in (decode, read_pixels):
        with pytest.raises(BadImage) as caught:
            read(data)
        reasons.append(str(caught.value))
    assert len(set(reasons)) == 1
    return reasons[0]


def webp(width: int, height: int) -> bytes:
    """34 bytes that say this size; in a real one all pixels may have one colour."""
    bits = (width - 1) | (height - 1) << 14
    return b"RIFF" + struct.pack("<I", 26) + b"WEBPVP8L" + struct.pack("<IBI", 13, 0x2F, bits) + bytes(9)


def png(width: int, height: int, kind: int = 2) -> bytes:
    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(10_000))) + chunk(b"IEND", b"")


def scans(width: int, height: int, more: int, **options: Any) -> bytes:
    """A progressive JPEG that says this size and has its last scan so many times more."""
    data = encode(picture(1, 64, 64), progressive=True, **options)
    last, frame = data.rindex(b"\xff\xda"), data.index(b"\xff\xc2")
    data = data[:last] + (more + 1) * data[last : data.rindex(b"\xff\xd9")] + b"\xff\xd9"
    return data[: frame + 5] + struct.pack(">HH", height, width) + data[frame + 9 :]


def resized(data: bytes, order: str = ">II") -> bytes:
    """An image of 64 x 64 pixels whose header says 10000 x 10000."""
    assert struct.pack(order, 64, 64) in data
    return data.replace(struct.pack(order, 64, 64), struct.pack(order, 10_000, 10_000))


def test_34_bytes_of_webp_do_not_take_gigabytes(undecoded: None) -> None:
    assert len(webp(16383, 10900)) == 34
    line = "16383 x 10900 pixels in 34 bytes would take 2895 MiB to decode, more than 256 MiB"
    assert refused(webp(16383, 10900)) == line
    assert refused(webp(16383, 16383)) == "16383 x 16383 pixels, more than 178956970"


@pytest.mark.parametrize("kind", ["VP8 ", "VP8X"])
def test_every_header_of_webp_has_a_size(kind: str, undecoded: None) -> None:
    image = Image.fromarray(picture(1, 64, 64))
    data = encode(image, "WEBP", icc_profile=b"x" if kind == "VP8X" else b"")
    assert data[12:16] == kind.encode()
    if kind == "VP8X":
        data = data[:24] + (11999).to_bytes(3, "little") + (7999).to_bytes(3, "little") + data[30:]
    else:
        data = data[:26] + struct.pack("<HH", 12000, 8000) + data[30:]
    assert refused(data).startswith(f"12000 x 8000 pixels in {len(data)} bytes would take 1556 MiB to decode")


@pytest.mark.parametrize("kind", ["AVIF", "JPEG2000", "HEIF", "GIF", "TIFF", "PNG"])
def test_no_format_makes_much_of_a_few_bytes(kind: str, undecoded: None) -> None:
    image = Image.fromarray(picture(1, 64, 64))
    if kind == "HEIF":
        pytest.importorskip("pillow_heif")
        image_extensions()  # registers the format
    if kind == "TIFF":
        data = tiff(picture(1, 64, 64), deflate=True, t256=10_000, t257=10_000, t262=2)
    else:
        data = resized(encode(image, kind), "<HH" if kind == "GIF" else ">II") if kind != "PNG" else png(10_000, 10_000)
    assert refused(data).startswith(f"10000 x 10000 pixels in {len(data)} bytes would take ")


def test_a_hundred_scans_of_a_large_jpeg_are_refused(undecoded: None) -> None:
    assert "scans of 13000 x 13000 pixels in" in (line := refused(scans(13_000, 13_000, 80)))
    assert line.endswith("bytes would take too long to decode")
    assert "scans of 4000 x 4000 pixels" in refused(scans(4000, 4000, 80))
    check_jpeg(scans(2000, 2000, 80))


def test_bytes_behind_a_jpeg_do_not_pay_for_endless_scans(undecoded: None) -> None:
    assert "would take too long" in refused(scans(13_000, 13_000, 80) + bytes(2**25))


@pytest.mark.parametrize("numbers", [b"\1\1\1", b"\1\2\3"])
def test_the_number_of_a_channel_may_be_there_twice(numbers: bytes) -> None:
    data = bytearray(scans(6000, 6000, 30, subsampling=0))
    frame = data.index(b"\xff\xc2")
    for i, number in enumerate(numbers):
        data[frame + 10 + 3 * i] = number
    with pytest.raises(BadImage, match="would take too long"):
        check_jpeg(bytes(data))


PROGRESSIVE: dict[str, Any] = {"progressive": True}


def test_a_photograph_of_170_megapixels_is_decoded() -> None:
    """One of a single colour has fewer bytes than any photograph."""
    data = encode(Image.new("RGB", (13_080, 13_000), (90, 120, 150)), quality=75)
    assert decode(data).shape == (3, 13_000, 13_080)


@pytest.mark.parametrize(
    ("mode", "options"),
    [(mode, options) for mode in ("RGB", "L") for options in ({}, PROGRESSIVE, PROGRESSIVE | {"subsampling": 0})]
    + [("CMYK", {})],
)
def test_photographs_of_170_megapixels_are_within_the_limits(
    mode: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With limits of a hundredth, for images of a hundredth."""
    for name in ("FREE", "FREE_WORK", "MAX_WORK", "MAX_PIXELS"):
        monkeypatch.setattr(costs, name, getattr(costs, name) // 100)
    data = encode(Image.new("RGB", (1308, 1300), (90, 120, 150)).convert(mode), quality=75, **options)
    assert check_jpeg(data)[:2] == (1300, 1308)


def test_a_header_of_endless_segments_is_refused() -> None:
    data = encode(picture(1, 64, 64))
    for segment in (b"\xff\xfe\0\2", b"\xff", b"\xff\1"):
        assert decode(data[:2] + 1000 * segment + data[2:]).shape == (3, 64, 64)
        assert "segments in its header" in refused(data[:2] + 20_000 * segment + data[2:])


@pytest.mark.parametrize("head", [b"P6 900 900 65535\n", b"P6 900 900 99\n", b"P3 900 900 255\n"])
def test_what_pillow_decodes_value_by_value_has_a_limit_of_its_own(
    head: bytes, undecoded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs, "MAX_SLOW", 2**20)
    data = head + (b"0 " if head[1:2] == b"3" else b"\0\0") * 2_430_000
    assert refused(data) == "2430000 values that Pillow decodes one after the other, more than 1048576"


def test_values_of_channels_have_the_same_limit(undecoded: None) -> None:
    from eagleray.data.channels import read_channels

    values = picture(1, 64, 64)
    assert read_channels(tiff(values, deflate=True)).shape == (64, 64, 3)
    with pytest.raises(BadImage, match=r"7000 x 8000 pixels of 3 channels in \d+ bytes would take \d+ MiB"):
        read_channels(tiff(values, deflate=True, t256=7000, t257=8000, t278=8000))


KINDS: dict[str, list[str]] = {
    "JPEG": ["RGB", "L", "CMYK"],
    "PNG": ["RGB", "L", "P", "1", "RGBA"],
    "WEBP": ["RGB", "RGBA"],
    "GIF": ["P"],
    "TIFF": ["RGB", "L", "1"],
    "BMP": ["RGB", "P"],
    "PPM": ["RGB", "L"],
    "AVIF": ["RGB"],
    "JPEG2000": ["RGB", "L"],
}


@pytest.mark.parametrize("count", counts(200))
def test_an_image_is_decoded_or_refused_by_its_size_and_bytes(
    count: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a limit of so little memory that small images pass it, at each place where a file has bytes that count for
    nothing; what is refused was not decoded."""
    monkeypatch.setattr(costs, "PER_BYTE", 4)
    load, loads = ImageFile.ImageFile.load, list[Any]()
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: (loads.append(self), load(self))[1])

    def check(rng: random.Random) -> None:
        kind = rng.choice(list(KINDS))
        width, height, free = rng.randint(1, 200), rng.randint(1, 200), rng.choice([0, 2**14, 2**16, 2**18, 2**22])
        options = {"progressive": rng.random() < 0.5} if kind == "JPEG" else {}
        image = Image.fromarray(picture(rng.randint(0, 9), height, width)).convert(rng.choice(KINDS[kind]))
        data = encode(image, kind, **options) + bytes(rng.choice([0, 0, 1000]))
        monkeypatch.setattr(costs, "FREE", free)
        loads.clear()
        most, need, why = free + 4 * len(data), width * height, ""
        try:
            assert decode(data).shape == (3, height, width)
        except BadImage as e:
            why = str(e)
        assert not why or f"{width} x {height} pixels in {len(data)} bytes would take" in why
        assert (20 * need > most and not loads) if why else 3 * need <= most

    examples(generators(count), check, count, many=5000)


@pytest.mark.parametrize("where", ["before", "behind"])
@pytest.mark.parametrize("kind", ["tEXt", "zTXt", "iTXt", "iCCP"])
def test_long_texts_of_a_png_do_not_make_its_pixels_bad(kind: str, where: str) -> None:
    """Image generators write how an image was made, and cameras long profiles."""
    image = picture(1, 40, 56)
    data, text = encode(image, "PNG"), b"x" * 2**21
    pack = zlib.compress(text)
    long = {"tEXt": b"a\0" + text, "zTXt": b"a\0\0" + pack, "iTXt": b"a\0\1\0\0\0" + pack, "iCCP": b"a\0\0" + pack}[
        kind
    ]
    chunk = struct.pack(">I", len(long)) + kind.encode() + long
    chunk += struct.pack(">I", zlib.crc32(kind.encode() + long))
    at = data.index(b"IDAT") - 4 if where == "before" else data.index(b"IEND") - 4
    got = decode(data[:at] + 33 * chunk + data[at:])
    assert (got.permute(1, 2, 0).numpy() == image).all()


@pytest.mark.parametrize("kind", ["eXIf", "xmp", "profile", "long profile"])
def test_a_png_with_texts_is_turned_upright(kind: str) -> None:
    exif, info = Image.Exif(), PngImagePlugin.PngInfo()
    exif[0x112] = 6
    info.add_text("prompt", "x" * 2_000_000, zip=True)
    profile = f"\nexif\n{len(exif.tobytes()):8d}\n{exif.tobytes().hex()}"
    if kind == "xmp":
        info.add_itxt("XML:com.adobe.xmp", '<x:xmpmeta tiff:Orientation="6"/>')
    elif kind.endswith("profile"):
        info.add_text("Raw profile type exif", profile + " " * 2**20 * (kind[:4] == "long"), zip=True)
    image = Image.fromarray(picture(1, 40, 56))
    image.save(buffer := io.BytesIO(), "PNG", pnginfo=info, **({"exif": exif} if kind == "eXIf" else {}))
    assert decode(buffer.getvalue()).shape == ((3, 40, 56) if kind == "long profile" else (3, 56, 40))
