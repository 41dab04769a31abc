"""Any image file becomes an upright RGB image, or a reason that means something to a reader."""

import io
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.pictures import encode, picture
from numpy.typing import NDArray
from PIL import Image, ImageOps

from eagleray.data import costs
from eagleray.data import decode as decoding
from eagleray.data.costs import jpeg_size
from eagleray.data.decode import BadImage, decode

HEIGHT, WIDTH = 40, 56
ORIENTATION = 0x112  # the EXIF tag


def pixels(data: bytes) -> NDArray[np.uint8]:
    """The decoded image as PIL would have it, (H, W, 3)."""
    image = decode(data)
    assert image.dtype == torch.uint8
    return image.permute(1, 2, 0).numpy()


def distance(a: NDArray, b: NDArray) -> int:
    assert a.shape == b.shape
    return int(abs(a.astype(int) - b.astype(int)).max())


def gray() -> Image.Image:
    return Image.fromarray(picture(1, HEIGHT, WIDTH)).convert("L")


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "WEBP"])
def test_lossless_files_give_back_their_pixels(kind: str) -> None:
    """Told apart by what is in them: nobody says what the file is called."""
    image = picture(1, HEIGHT, WIDTH)
    assert distance(pixels(encode(image, kind, **({"lossless": True} if kind == "WEBP" else {}))), image) == 0


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}, {"quality": 30}])
def test_jpegs_are_as_pil_decodes_them(options: dict[str, Any]) -> None:
    data = encode(picture(1, HEIGHT, WIDTH), **options)
    assert distance(pixels(data), np.asarray(Image.open(io.BytesIO(data)))) <= 1


@pytest.mark.parametrize("turned", range(1, 9))
@pytest.mark.parametrize(
    "options",
    [{}, {"progressive": True}, {"subsampling": 0}, {"subsampling": 1}, {"quality": 30}, {"keep_rgb": True}],
)
@pytest.mark.parametrize("size", [(HEIGHT, WIDTH), (33, 47), (1, 1)])
def test_pixels_do_not_depend_on_the_decoder(
    options: dict[str, Any], turned: int, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchvision's will be removed, and simplejpeg may be missing beside a model in MLflow."""
    exif = Image.Exif()
    exif[ORIENTATION] = turned
    colours = encode(picture(1, *size), **options, exif=exif)
    grey = encode(picture(1, *size)[..., 0], exif=exif)
    before = [decode(memoryview(data)) for data in (colours, grey)]
    with pytest.raises(BadImage):
        decode(colours[: len(colours) // 2])
    for missing in ("decode_jpeg", "simplejpeg"):
        with monkeypatch.context() as patched:
            patched.setattr(decoding, missing, None)
            for one, data in zip(before, (colours, grey), strict=True):
                assert torch.equal(decode(memoryview(data)), one)
            with pytest.raises(BadImage):
                decode(colours[: len(colours) // 2])


def test_a_decoded_photograph_is_not_copied_to_put_its_channels_first() -> None:
    assert decode(encode(picture(1, HEIGHT, WIDTH))).stride() == (1, 3 * WIDTH, 3)


def test_a_view_of_the_bytes_will_do() -> None:
    """The stream hands out parts of a block, which are not copied and must not be written to."""
    for kind in ("JPEG", "PNG"):
        data = encode(picture(1), kind)
        padded = b"before" + data + b"after"
        assert torch.equal(decode(memoryview(padded)[6 : 6 + len(data)]), decode(data))
        assert padded == b"before" + data + b"after"


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_gray_becomes_three_equal_channels(kind: str) -> None:
    got = pixels(encode(gray(), kind, **({"quality": 98} if kind == "JPEG" else {})))
    assert distance(got, np.stack([gray()] * 3, 2)) <= (0 if kind == "PNG" else 6)
    assert (got == got[..., :1]).all()


def before(image: Image.Image, ground: int) -> NDArray[np.uint8]:
    """An image before a grey ground, by the definition of alpha."""
    rgba = np.asarray(image.convert("RGBA")).astype(float)
    alpha = rgba[..., 3:] / 255
    return np.rint(rgba[..., :3] * alpha + ground * (1 - alpha)).astype(np.uint8)


def test_what_is_transparent_shows_white() -> None:
    image = picture(1, HEIGHT, WIDTH)
    alpha = Image.fromarray(np.arange(HEIGHT * WIDTH, dtype=np.uint8).reshape(HEIGHT, WIDTH))
    rgba, la = Image.fromarray(image), gray()
    rgba.putalpha(alpha)
    la.putalpha(alpha)
    assert (rgba.mode, la.mode) == ("RGBA", "LA")
    assert distance(pixels(encode(rgba, "PNG")), before(rgba, 255)) <= 1
    assert distance(pixels(encode(la, "PNG")), before(la, 255)) <= 1
    rgba.putalpha(255)
    assert distance(pixels(encode(rgba, "PNG")), image) == 0


@pytest.mark.parametrize("transparency", [0, b"\x00\x80\xff" * 5])
def test_what_is_transparent_in_a_palette_shows_white(transparency: Any, recwarn: Any) -> None:
    palette = Image.fromarray(picture(1, HEIGHT, WIDTH)).quantize(32)
    data = encode(palette, "PNG", transparency=transparency)
    assert Image.open(io.BytesIO(data)).mode == "P"
    assert distance(pixels(data), before(Image.open(io.BytesIO(data)), 255)) <= 1
    assert distance(pixels(encode(palette, "PNG")), np.asarray(palette.convert("RGB"))) == 0
    assert not [w for w in recwarn if issubclass(w.category, UserWarning)]


LETTERS = np.zeros((HEIGHT, WIDTH), np.uint8)
LETTERS[10:20, 10:40] = 255


def letters(grey: int, kind: str, mode: str = "RGBA") -> bytes:
    """Letters of this grey on nothing, where the hidden colour is the same."""
    image = Image.fromarray(np.full((HEIGHT, WIDTH), grey, np.uint8)).convert("RGB")
    image.putalpha(Image.fromarray(LETTERS))
    return encode(image.convert(mode), kind, **({"lossless": True} if kind == "WEBP" else {}))


@pytest.mark.parametrize(
    ("kind", "mode"), [("PNG", "RGBA"), ("PNG", "LA"), ("WEBP", "RGBA"), ("TIFF", "RGBA"), ("AVIF", "RGBA")]
)
@pytest.mark.parametrize("grey", [0, 255])
def test_letters_on_nothing_are_seen(kind: str, mode: str, grey: int) -> None:
    """Black ones on white, and white ones on black, which a viewer would show before white too: as nothing."""
    got = pixels(letters(grey, kind, mode))
    assert distance(got, np.repeat(np.where(LETTERS == 255, grey, 255 - grey)[..., None], 3, 2)) <= (
        8 if kind == "AVIF" else 0
    )


@pytest.mark.parametrize("transparency", [{"transparency": 0}, {"transparency": b"\x00\xff"}])
def test_letters_on_nothing_in_a_palette_are_seen(transparency: dict[str, Any]) -> None:
    image = Image.fromarray(LETTERS // 255).convert("P")
    image.putpalette([0, 0, 0] * 2)
    kind = "GIF" if transparency["transparency"] == 0 else "PNG"
    got = pixels(encode(image, kind, **transparency))
    assert distance(got, np.repeat(255 - LETTERS[..., None], 3, 2)) == 0


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF"])
def test_colours_that_are_all_hidden_are_taken_and_one_colour_is_nothing(kind: str) -> None:
    """As programs leave the fourth channel at zero that know no alpha."""
    image = Image.fromarray(picture(1, HEIGHT, WIDTH))
    image.putalpha(0)
    options = {"lossless": True, "exact": True} if kind == "WEBP" else {}
    assert distance(pixels(encode(image, kind, **options)), picture(1, HEIGHT, WIDTH)) == 0
    assert reason(encode(Image.new("RGBA", (9, 9), (3, 4, 5, 0)), kind)) == (
        "nothing is seen in it: it is transparent and of one colour"
    )
    assert pixels(encode(Image.new("RGBA", (9, 9), (3, 4, 5, 255)), kind)).max() in (5, 6)


def test_one_bit_becomes_black_and_white() -> None:
    image = gray().convert("1", dither=Image.Dither.NONE)
    got = pixels(encode(image, "PNG"))
    assert distance(got[..., 0], np.asarray(image) * 255) == 0
    assert set(np.unique(got)) == {0, 255}


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_sixteen_bits_are_scaled_and_not_clipped_to_white(kind: str) -> None:
    deep = np.linspace(0, 65535, HEIGHT * WIDTH).astype(np.uint16).reshape(HEIGHT, WIDTH)
    got = pixels(encode(Image.fromarray(deep), kind))
    assert distance(got, np.stack([deep // 257] * 3, 2)) <= 1
    assert (np.diff(got[..., 0].flatten().astype(int)) >= 0).all()


def test_cmyk_is_as_pil_converts_it_and_not_inverted() -> None:
    image = picture(1, HEIGHT, WIDTH)
    data = encode(Image.fromarray(image).convert("CMYK"), quality=98)
    assert distance(pixels(data), image) < 12
    opened = Image.open(io.BytesIO(data))
    assert opened.mode == "CMYK"
    assert distance(pixels(data), np.asarray(opened.convert("RGB"))) == 0


def test_an_animation_gives_its_first_frame() -> None:
    frames = [Image.fromarray(picture(i, HEIGHT, WIDTH)).quantize(64) for i in (1, 2)]
    data = encode(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert Image.open(io.BytesIO(data)).n_frames == 2
    assert distance(pixels(data), np.asarray(frames[0].convert("RGB"))) == 0


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_exif_orientation_is_upright_as_pils(kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    data = encode(picture(1, HEIGHT, WIDTH), kind, exif=exif.tobytes())
    image = Image.open(io.BytesIO(data))
    assert image.getexif()[ORIENTATION] == orientation
    got = pixels(data)
    assert distance(got, np.asarray(ImageOps.exif_transpose(image).convert("RGB"))) <= 1
    assert got.shape[:2] == ((WIDTH, HEIGHT) if orientation >= 5 else (HEIGHT, WIDTH))


@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 300), (300, 1), (7, 5)])
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_any_size(kind: str, height: int, width: int) -> None:
    assert decode(encode(picture(1, height, width), kind)).shape == (3, height, width)


def reason(data: bytes) -> str:
    with pytest.raises(BadImage) as caught:
        decode(data)
    return str(caught.value)


def text(data: bytes) -> bytes:
    return b"<html><body>404 not found</body></html>"


BREAK: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda d: b"", "cannot identify image file"),
    "text": (text, "cannot identify image file"),
    "header": (lambda d: d[:20], "the JPEG ends inside its header"),
    "magic": (lambda d: b"\0\0" + d[2:], "cannot identify image file"),
    "garbage": (lambda d: d[:2] + b"\0" * 200, "damaged JPEG header"),
}


@pytest.mark.parametrize("name", BREAK)
def test_what_is_no_image_has_its_reason(name: str) -> None:
    damage, expected = BREAK[name]
    assert reason(damage(encode(picture(1)))) == expected


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7, 0.9, 0.99])
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_a_truncated_image_is_refused(kind: str, share: float) -> None:
    data = encode(picture(1, 80, 80), kind)
    assert "truncated" in reason(data[: int(share * len(data))]).lower()


def test_a_flipped_bit_in_a_png_is_noticed() -> None:
    data = bytearray(encode(picture(1), "PNG"))
    data[len(data) // 2] ^= 1
    assert reason(bytes(data))


def test_damage_anywhere_ends_in_an_image_or_in_a_reason() -> None:
    """Which is one short line without places in memory or in source files."""
    rng = np.random.default_rng(0)
    files = [encode(picture(i, 24, 24), kind) for i in range(3) for kind in ("JPEG", "PNG", "WEBP", "GIF", "TIFF")]
    files.append(encode(Image.fromarray(picture(9, 24, 24)).convert("CMYK")))
    reasons = []
    for _ in range(1000):
        data = bytearray(files[rng.integers(len(files))])
        for at in rng.integers(0, len(data), rng.integers(1, 8)):
            data[at] = rng.integers(256)
        try:
            image = decode(bytes(data[: rng.integers(1, len(data) + 1)] if rng.random() < 0.3 else data))
        except BadImage as e:
            reasons.append(str(e))
        else:
            assert image.shape[0] == 3
            assert image.dtype == torch.uint8
    assert 200 < len(reasons) < 800
    for line in reasons:
        assert 3 < len(line) <= 200
        assert not re.search(r"\n|/|0x[0-9a-f]{6}|\.cpp|\.py|BytesIO", line)


def large(data: bytes, height: int, width: int) -> bytes:
    """A JPEG whose frame header lies about its size."""
    at = data.index(b"\xff\xc0")
    return data[: at + 5] + height.to_bytes(2) + width.to_bytes(2) + data[at + 9 :]


def test_a_decompression_bomb_is_refused_before_it_is_decoded() -> None:
    assert reason(large(encode(picture(1)), 30_000, 30_000)) == f"30000 x 30000 pixels, more than {costs.MAX_PIXELS}"


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_the_limit_on_pixels_is_the_same_for_every_format(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert 2 * (Image.MAX_IMAGE_PIXELS or 0) == costs.MAX_PIXELS
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 50)
    monkeypatch.setattr(costs, "MAX_PIXELS", 100)
    assert decode(encode(picture(1, 10, 10), kind)).shape == (3, 10, 10)
    assert "pixels" in reason(encode(picture(1, 10, 11), kind))


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"comment": b"\xff\xc0 a comment"}, {"dpi": (72, 72)}])
def test_the_size_is_in_the_frame_header(mode: str, options: dict[str, Any]) -> None:
    data = encode(Image.fromarray(picture(1, 20, 30)).convert(mode), **options)
    assert jpeg_size(data) == (20, 30, len(mode) if mode != "L" else 1)
