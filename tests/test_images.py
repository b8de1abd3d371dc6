"""Decoding of picture files, against Pillow, NumPy and files written by hand."""

import io
import os
import struct
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps

from vit_jax.data import images

RED = (255, 0, 0)


def encoded(image, kind, **options):
  buffer = io.BytesIO()
  image.save(buffer, kind, **options)
  return buffer.getvalue()


def png(pixels, depth, colour, extra=b""):
  """A PNG written by hand: pixels [h, w, c] of `depth` bits; `extra` is its tRNS."""

  def chunk(name, body):
    crc = zlib.crc32(name + body)
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", crc)

  height, width = pixels.shape[:2]
  lines = pixels.astype(">u2" if depth == 16 else "u1").reshape(height, -1)
  packed = zlib.compress(b"".join(b"\0" + line.tobytes() for line in lines))
  header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
  transparency = chunk(b"tRNS", extra) if extra else b""
  return (
    b"\x89PNG\r\n\x1a\n"
    + chunk(b"IHDR", header)
    + transparency
    + chunk(b"IDAT", packed)
    + chunk(b"IEND", b"")
  )


def noise(height, width, channels=3, seed=0):
  draw = np.random.default_rng(seed)
  return draw.integers(0, 256, (height, width, channels), np.uint8)


def read(content, size=None, channels=3):
  return images.read(content, size=size, channels=channels)


def test_png_named_jpg_and_bytes(tmp_path):
  pixels = noise(5, 7)
  path = tmp_path / "picture.jpg"
  path.write_bytes(encoded(Image.fromarray(pixels), "PNG"))
  np.testing.assert_array_equal(images.read(path, size=None, channels=3), pixels)
  np.testing.assert_array_equal(read(path.read_bytes()), pixels)


@pytest.mark.parametrize("kind", ["PNG", "BMP", "WEBP"])
def test_lossless_formats(kind):
  pixels = noise(6, 9)
  options = {"lossless": True} if kind == "WEBP" else {}
  content = encoded(Image.fromarray(pixels), kind, **options)
  np.testing.assert_array_equal(read(content), pixels)


def without_adobe(content):
  """Drops the APP14 segment, in which Adobe's programs sign a JPEG."""
  at = content.index(b"\xff\xee")
  length = struct.unpack(">H", content[at + 2 : at + 4])[0]
  return content[:at] + content[at + 2 + length :]


@pytest.mark.parametrize("adobe", [True, False])
def test_cmyk_is_red(adobe):
  cmyk = np.broadcast_to(np.array([0, 255, 255, 0], np.uint8), (16, 16, 4))
  content = encoded(Image.fromarray(cmyk, mode="CMYK"), "JPEG", quality=95)
  assert b"Adobe" in content
  if not adobe:  # the segment is missing in some files; the values mean the same
    content = without_adobe(content)
  pixels = read(content)
  assert pixels.shape == (16, 16, 3)
  assert pixels[..., 0].min() > 250
  assert pixels[..., 1:].max() < 5
  assert np.abs(read(content, channels=1) - 76.0).max() <= 2  # luma of red


def test_16_bit_grey_equals_its_8_bit_twin():
  ramp = np.arange(256, dtype=np.uint16).reshape(16, 16, 1)
  deep, flat = png(ramp * 257, 16, 0), png(ramp, 8, 0)
  np.testing.assert_array_equal(read(deep), read(flat))
  np.testing.assert_array_equal(read(deep, channels=1), ramp)
  # Values between the multiples of 257 stay within one level of the true one.
  odd = np.random.default_rng(0).integers(0, 65536, (8, 8, 1)).astype(np.uint16)
  assert np.abs(read(png(odd, 16, 0), channels=1) - odd / 257.0).max() <= 1


def test_16_bit_colour_equals_its_8_bit_twin():
  for colour, channels in ((2, 3), (4, 2), (6, 4)):  # RGB, grey + alpha, RGB + alpha
    pixels = noise(6, 5, channels)
    deep = png(pixels.astype(np.uint16) * 257, 16, colour)
    np.testing.assert_array_equal(read(deep), read(png(pixels, 8, colour)))
  np.testing.assert_array_equal(
    read(png(noise(6, 5) * np.uint16(257), 16, 2)), noise(6, 5)
  )


def test_16_bit_grey_with_a_transparent_level():
  level = np.array([[[1000], [30000]]], np.uint16)
  content = png(level, 16, 0, extra=struct.pack(">H", 1000))
  assert read(content, channels=1).ravel().tolist() == [images.BACKGROUND, 30000 >> 8]


def test_alpha_is_composited_on_the_background():
  pixels = np.zeros((4, 8, 4), np.uint8)
  pixels[:, :4] = (200, 200, 200, 0)  # hidden colour
  pixels[:, 4:] = (*RED, 255)
  out = read(encoded(Image.fromarray(pixels), "PNG"))
  assert (out[:, :4] == images.BACKGROUND).all()
  assert (out[:, 4:] == RED).all()


def test_alpha_against_float64_and_opaque_is_exact():
  colour, alpha = noise(16, 16), noise(16, 16, 1, seed=1)
  out = read(encoded(Image.fromarray(np.concatenate([colour, alpha], -1)), "PNG"))
  share = alpha / 255.0
  expected = colour * share + images.BACKGROUND * (1 - share)
  np.testing.assert_allclose(out, expected, atol=0.5 + 1e-9, rtol=0)
  opaque = np.concatenate([colour, np.full_like(alpha, 255)], -1)
  np.testing.assert_array_equal(read(encoded(Image.fromarray(opaque), "PNG")), colour)


def test_grey_with_alpha():
  pixels = np.array([[[10, 255], [10, 0]]], np.uint8)
  out = read(encoded(Image.fromarray(pixels, mode="LA"), "PNG"), channels=1)
  assert out.ravel().tolist() == [10, images.BACKGROUND]


def test_palette_and_its_transparency():
  image = Image.new("P", (2, 1))
  image.putpalette([255, 0, 0, 0, 0, 255])
  image.putpixel((1, 0), 1)
  assert read(encoded(image, "PNG")).tolist() == [[[255, 0, 0], [0, 0, 255]]]
  content = encoded(image, "PNG", transparency=1)
  assert read(content).tolist() == [[[255, 0, 0], [images.BACKGROUND] * 3]]
  # Grey is the luma of the colours, not the palette's indices.
  assert read(encoded(image, "PNG"), channels=1).ravel().tolist() == [76, 29]


def test_one_bit():
  bits = np.array([[True, False, True]])
  out = read(encoded(Image.fromarray(bits), "PNG"))
  assert out[..., 0].tolist() == [[255, 0, 255]]


def test_grey_is_the_luma_of_itu_r_601():
  pixels = noise(8, 8)
  out = read(encoded(Image.fromarray(pixels), "PNG"), channels=1)
  expected = pixels @ np.array([0.299, 0.587, 0.114])
  np.testing.assert_allclose(out[..., 0], expected, atol=0.51)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_exif_orientation(orientation, kind):
  image = Image.fromarray(np.kron(noise(2, 3), np.ones((8, 8, 1), np.uint8)))
  exif = Image.Exif()
  exif[0x0112] = orientation
  content = encoded(image, kind, exif=exif)
  upright = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
  np.testing.assert_array_equal(read(content), np.asarray(upright))
  assert images.shape(content) == upright.size[::-1]


@pytest.mark.parametrize("orientation", [0, 9, 77])
def test_orientation_out_of_range_is_none(orientation):
  pixels = noise(4, 6)
  exif = Image.Exif()
  exif[0x0112] = orientation
  content = encoded(Image.fromarray(pixels), "PNG", exif=exif)
  np.testing.assert_array_equal(read(content), pixels)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_broken_exif_does_not_spoil_the_pixels():
  image = Image.fromarray(noise(8, 8))
  content = encoded(image, "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
  np.testing.assert_array_equal(read(content), read(encoded(image, "JPEG")))


def test_first_picture_of_a_phone_jpeg():
  first, second = (Image.fromarray(noise(8, 8, seed=k)) for k in (0, 1))
  content = encoded(first, "MPO", save_all=True, append_images=[second])
  np.testing.assert_array_equal(read(content), read(encoded(first, "JPEG")))


def bad_files():
  picture = Image.fromarray(noise(64, 64))
  frames = [Image.fromarray(noise(8, 8, seed=k)) for k in range(2)]
  moving = {"save_all": True, "append_images": frames[1:]}
  jpeg, flat = encoded(picture, "JPEG"), encoded(picture, "PNG")
  broken = bytearray(flat)
  broken[len(flat) // 2] ^= 255
  return {
    "truncated.jpg": (jpeg[: len(jpeg) // 2], "truncated"),
    "truncated.png": (flat[: len(flat) // 2], "truncated"),
    "truncated.webp": (encoded(picture, "WEBP")[:-40], "truncated"),
    "truncated.bmp": (encoded(picture, "BMP")[:-40], "truncated"),
    "flipped.png": (bytes(broken), "broken PNG"),
    "header.jpg": (jpeg[:10], "Truncated"),
    "start.jpg": (jpeg[:2], "a JPEG with a damaged header"),
    "empty.jpg": (b"", "empty (0 bytes)"),
    "text.jpg": (b"not a picture\n", "a text file"),
    "page.jpg": (b"<!DOCTYPE html>", "a text file"),
    "still.jpg": (encoded(frames[0], "GIF"), "a GIF"),
    "moving.jpg": (encoded(frames[0], "GIF", **moving), "a GIF"),
    "moving.webp": (encoded(frames[0], "WEBP", **moving), "animated WEBP of 2"),
    "moving.png": (encoded(frames[0], "PNG", **moving), "animated PNG of 2"),
    "scan.jpg": (encoded(picture, "TIFF"), "a TIFF"),
    "noise.jpg": (bytes(range(128, 256)), "unknown format"),
  }


@pytest.mark.parametrize("name", bad_files())
def test_bad_files_are_named(tmp_path, name):
  content, reason = bad_files()[name]
  path = tmp_path / name
  path.write_bytes(content)
  with pytest.raises(images.ImageError) as caught:
    images.read(path, size=(8, 8), channels=3)
  text = str(caught.value)
  assert str(path) in text and reason in text and "\n" not in text
  assert images.failures([path]) == [(str(path), text)]


def test_missing_file_and_folder(tmp_path):
  with pytest.raises(FileNotFoundError, match="nowhere"):
    images.read(tmp_path / "nowhere.png", size=None, channels=3)
  with pytest.raises(images.ImageError, match="a folder"):
    images.read(tmp_path, size=None, channels=3)
  os.mkfifo(tmp_path / "pipe.png")
  with pytest.raises(images.ImageError, match="device"):
    images.read(tmp_path / "pipe.png", size=None, channels=3)
  with pytest.raises(ValueError, match="channels=4"):
    images.read(b"", size=None, channels=4)


@pytest.mark.parametrize("side", [10_000, 20_000])
@pytest.mark.parametrize("action", ["error", "ignore"])
def test_decompression_bomb_is_refused_before_decoding(side, action, monkeypatch):
  header = png(np.zeros((1, 1, 1)), 8, 0)
  bomb = header[:16] + struct.pack(">II", side, side) + header[24:]
  bomb = bomb[:29] + struct.pack(">I", zlib.crc32(bomb[12:29])) + bomb[33:]
  monkeypatch.setattr(Image.Image, "load", lambda *_: pytest.fail("decoded"))
  with warnings.catch_warnings():
    warnings.simplefilter(action)
    with pytest.raises(images.ImageError, match="pixels"):
      read(bomb)


def test_absurdly_large_file_is_not_read(tmp_path):
  path = tmp_path / "large.jpg"
  with open(path, "wb") as file:
    file.truncate(images.MAX_BYTES + 1)  # sparse: takes no disk
  with pytest.raises(images.ImageError, match="bytes"):
    images.read(path, size=None, channels=3)


def test_resize_equals_shorter_side_then_centre_crop():
  pixels = noise(20, 40)
  whole = Image.fromarray(pixels).resize((20, 10), Image.Resampling.BICUBIC)
  expected = np.asarray(whole.crop((5, 0, 15, 10)))
  np.testing.assert_array_equal(images.resize(pixels, (10, 10)), expected)
  turned = images.resize(pixels.transpose(1, 0, 2), (10, 10))
  np.testing.assert_allclose(turned, expected.transpose(1, 0, 2), atol=1)


def test_resize_from_any_size():
  """The box never leaves the image by rounding."""
  whole = np.full((500, 500, 3), 77, np.uint8)
  for n in range(200, 501):
    for image in (whole[:n, :499], whole[:499, :n], whole[:n, :n]):
      assert (images.resize(image, (224, 224)) == 77).all(), image.shape
  for n in range(1, 40):
    for size in ((32, 32), (7, 13), (13, 7)):
      assert (images.resize(whole[:n, :17], size) == 77).all(), (n, size)


def test_resize_smooths_what_it_cannot_show():
  checks = (np.indices((32, 32)).sum(0) % 2 * 255).astype(np.uint8)[..., None]
  small = images.resize(checks, (4, 4))
  assert small.shape == (4, 4, 1)
  assert np.abs(small.astype(int) - 127).max() <= 1


@pytest.mark.parametrize("size", [(1, 1), (3, 7), (7, 3), (50, 50), (11, 13)])
@pytest.mark.parametrize("channels", [1, 2, 3])
def test_resize_to_any_size(size, channels):
  flat = np.full((11, 13, channels), 99, np.uint8)
  out = images.resize(flat, size)
  assert out.shape == (*size, channels) and out.dtype == np.uint8
  assert (out == 99).all()


def test_resize_to_the_same_size_changes_nothing():
  pixels = noise(9, 4)
  np.testing.assert_array_equal(images.resize(pixels, (9, 4)), pixels)
  out = read(encoded(Image.fromarray(pixels), "PNG"), size=(9, 4))
  np.testing.assert_array_equal(out, pixels)
  small = read(encoded(Image.fromarray(pixels), "PNG"), size=(3, 2))
  np.testing.assert_array_equal(small, images.resize(pixels, (3, 2)))


def test_in_threads_keeps_the_order():
  assert images.in_threads(lambda i: i * i, range(5000)) == [i * i for i in range(5000)]


@pytest.mark.parametrize("name", ["bicubic", "bilinear", "lanczos", "box"])
def test_interpolation_is_that_of_pillow(name):
  pixels = noise(12, 18)
  picture = Image.fromarray(pixels)
  expected = np.asarray(picture.resize((9, 6), getattr(Image.Resampling, name.upper())))
  out = images.read(
    encoded(picture, "PNG"), size=(6, 9), channels=3, interpolation=name
  )
  np.testing.assert_array_equal(out, expected)
