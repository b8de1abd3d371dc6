"""One picture file to one uint8 array, by one rule for training, evaluation, predict.

The rule, in order:

1. The format is found from the first bytes, never from the name: JPEG, PNG, WebP, BMP.
   Anything else, and anything animated, is refused by name.
2. A file of more than `MAX_BYTES` bytes or `MAX_PIXELS` pixels is refused undecoded.
3. CMYK becomes RGB, read as all writers store it (inverted, Adobe's way); palettes
   become their colours; of 16 bits a channel the high byte is kept (v >> 8, so 257 * k
   becomes k).
4. Transparency is composited on `BACKGROUND`; opaque pixels are untouched by it.
5. The EXIF orientation is applied; colour profiles are not.
6. `resize`: the largest centred box of the wanted aspect ratio, scaled to the wanted
   size by an interpolation whose kernel widens with the reduction (antialias), bicubic
   where nothing else is asked for.
"""

import io
import os
import stat
import struct
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from PIL import Image, UnidentifiedImageError

# Transparent pixels show this grey level in every channel: white, as on a page.
BACKGROUND = 255
# Most pixels of one picture; a decompression bomb declares more (Pillow's own warning
# level).
MAX_PIXELS = 89_478_485
# Largest file: that many pixels uncompressed, and some.
MAX_BYTES = 1 << 29
# Endings of the files a folder is searched for, in any letter case.
EXTENSIONS = (".bmp", ".jpeg", ".jpg", ".png", ".webp")

_FORMATS = ("JPEG", "PNG", "WEBP", "BMP")
# MPO: a JPEG that carries further pictures behind the first, as phones write; the first
# one is read.
_MULTI = "MPO"
_ORIENTATION_TAG = 0x0112
_ORIENTATIONS = {
  2: Image.Transpose.FLIP_LEFT_RIGHT,
  3: Image.Transpose.ROTATE_180,
  4: Image.Transpose.FLIP_TOP_BOTTOM,
  5: Image.Transpose.TRANSPOSE,
  6: Image.Transpose.ROTATE_270,
  7: Image.Transpose.TRANSVERSE,
  8: Image.Transpose.ROTATE_90,
}
# First bytes of what people rename to .jpg, to name it in the error.
_SIGNATURES = {
  b"GIF8": "a GIF",
  b"II*\0": "a TIFF",
  b"MM\0*": "a TIFF",
  b"%PDF": "a PDF",
  b"\x1f\x8b": "a gzip file",
  b"PK\x03\x04": "a zip file",
  b"\0\0\x01\0": "an icon",
  b"8BPS": "a Photoshop file",
  b"\0\0\0\x0cjP": "a JPEG 2000",
  b"\xff\xd8": "a JPEG with a damaged header",
  b"\x89PNG": "a PNG with a damaged header",
  b"RIFF": "a RIFF (WebP) file with a damaged header",
  b"BM": "a BMP with a damaged header",
}
_BRANDS = {b"avif": "an AVIF", b"avis": "an AVIF", b"heic": "a HEIC", b"mif1": "a HEIF"}


class ImageError(ValueError):
  """A picture that cannot be read: names the file and the reason, in one line."""


def read(
  source: str | os.PathLike | bytes,
  *,
  size: tuple[int, int] | None,
  channels: int,
  interpolation: str = "bicubic",
) -> np.ndarray:
  """Reads one picture by the rule of this module.

  Args:
    source: path of a file, or its bytes.
    size: (height, width) to resize to; None: as it is.
    channels: 3 for RGB, 1 for grey (luma of ITU-R 601 where the picture has colours).
    interpolation: as `data.interpolation`.

  Returns:
    uint8 [height, width, channels].

  Raises:
    ImageError: unreadable, of another format, animated, or too large.
    FileNotFoundError: no such file.
  """
  if channels not in (1, 3):
    raise ValueError(f"channels={channels}: expected 1 (grey) or 3 (RGB)")
  name, content = _content(source)
  with _opened(name, content) as image:
    try:
      orientation = _orientation(image)
      image.load()
      image = _flat(image, channels)
    except MemoryError:
      raise
    except Exception as error:  # the decoders raise half a dozen types on bad bytes
      raise ImageError(f"{name}: {_reason(error)}") from None
    if orientation in _ORIENTATIONS:
      image = image.transpose(_ORIENTATIONS[orientation])
    pixels = np.asarray(image)
  pixels = pixels.reshape(*pixels.shape[:2], channels)
  if size is None:
    return np.ascontiguousarray(pixels)
  return resize(pixels, size, interpolation)


def shape(source: str | os.PathLike | bytes) -> tuple[int, int]:
  """Returns (height, width) as `read` would, from the header alone.

  Raises:
    ImageError: as `read`, as far as the header tells.
  """
  name, content = _content(source)
  with _opened(name, content) as image:
    width, height = image.size
    return (width, height) if _orientation(image) >= 5 else (height, width)


def resize(
  image: np.ndarray, size: tuple[int, int], interpolation: str = "bicubic"
) -> np.ndarray:
  """Cuts the largest centred box of the wanted aspect ratio and scales it.

  That is "resize the shorter side, then crop the centre" in one interpolation with
  antialias (Pillow widens the kernel by the reduction, as for `Image.resize`).

  Args:
    image: uint8 [h, w, c].
    size: (height, width) wanted.
    interpolation: "bicubic", "bilinear", "lanczos" or "box"; box gives the plain average
      of the pixels that fall into one, so that a pixel of the result knows nothing of
      its neighbours'.

  Returns:
    uint8 [height, width, c]; `image` itself where it has that size already.
  """
  old_height, old_width, channels = image.shape
  height, width = size
  if (old_height, old_width) == (height, width):
    return image
  # The side that is not cut is taken as it is: by way of a common scale, rounding could
  # put the box a hair outside, which Pillow refuses.
  if old_height * width <= old_width * height:
    box_height, box_width = old_height, old_height * width / height
  else:
    box_height, box_width = old_width * height / width, old_width
  top, left = (old_height - box_height) / 2, (old_width - box_width) / 2
  box = (left, top, old_width - left, old_height - top)

  resampling = Image.Resampling[interpolation.upper()]

  def scaled(plane):
    picture = Image.fromarray(np.ascontiguousarray(plane))
    resampled = picture.resize((width, height), resampling, box=box)
    return np.asarray(resampled)

  if channels == 3:
    return scaled(image)
  return np.stack([scaled(image[..., c]) for c in range(channels)], axis=-1)


def failures(paths) -> list[tuple[str, str]]:
  """Decodes every file; returns (path, reason) of those that `read` refuses."""
  reasons = in_threads(_failure, paths)
  return [(str(p), reason) for p, reason in zip(paths, reasons) if reason is not None]


def in_threads(function, items) -> list:
  """Returns `[function(item) for item in items]`, run in threads.

  Pillow decodes outside of Python's lock. In blocks, because a million waiting calls
  take a gigabyte.
  """
  results = []
  with ThreadPoolExecutor() as pool:
    for start in range(0, len(items), 4096):
      results += pool.map(function, items[start : start + 4096])
  return results


def _failure(path):
  try:
    read(path, size=None, channels=3)
  except (ImageError, OSError) as error:
    return str(error)
  return None


def _content(source):
  """Returns (name for messages, bytes)."""
  if isinstance(source, (bytes, bytearray, memoryview)):
    name, content = "image", bytes(source)
  else:
    name = os.fspath(source)
    if isinstance(name, bytes):
      name = os.fsdecode(name)
    about = os.stat(name)
    if not stat.S_ISREG(about.st_mode):  # a pipe would block, a device never end
      raise ImageError(f"{name}: a folder or device, expected a picture file")
    if about.st_size > MAX_BYTES:
      raise ImageError(f"{name}: more than {MAX_BYTES} bytes")
    with open(name, "rb") as file:
      content = file.read()
  if not content:
    raise ImageError(f"{name}: empty (0 bytes)")
  return name, content


def _opened(name, content):
  """Returns the undecoded picture, once its format, frames and size are accepted."""
  try:
    image = Image.open(io.BytesIO(content), formats=_FORMATS)
    if image.format == "PNG":  # decoding alone does not look at the checksums
      Image.open(io.BytesIO(content), formats=("PNG",)).verify()
  except UnidentifiedImageError:
    raise ImageError(
      f"{name}: {_kind(content)}, not a JPEG, PNG, WebP or BMP"
    ) from None
  except (Image.DecompressionBombError, Image.DecompressionBombWarning):
    raise ImageError(f"{name}: more than {MAX_PIXELS} pixels") from None
  except Exception as error:
    raise ImageError(f"{name}: {_reason(error)}") from None
  if image.width * image.height > MAX_PIXELS:
    raise ImageError(
      f"{name}: {image.width}x{image.height} is more than {MAX_PIXELS} pixels"
    )
  if image.format != _MULTI and getattr(image, "n_frames", 1) > 1:
    raise ImageError(
      f"{name}: an animated {image.format} of {image.n_frames} frames, expected one "
      "still picture"
    )
  return image


def _kind(content):
  """Names the format of bytes that are no picture of ours."""
  for signature, kind in _SIGNATURES.items():
    if content.startswith(signature):
      return kind
  if content[4:8] == b"ftyp" and content[8:12] in _BRANDS:
    return _BRANDS[content[8:12]]
  try:
    content[:64].decode("ascii")
  except UnicodeDecodeError:
    return "of an unknown format"
  return "a text file"


def _reason(error):
  """One line of the decoder's own words."""
  return " ".join(str(error).split()) or type(error).__name__


def _orientation(image):
  """Returns the EXIF orientation 1..8; 1 where there is none or EXIF is broken.

  A broken EXIF block does not make the pixels wrong, so it is no reason to refuse.
  """
  try:
    value = image.getexif().get(_ORIENTATION_TAG, 1)
  except (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    LookupError,
    struct.error,
  ):
    return 1
  return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _flat(image, channels):
  """Decoded picture of any mode -> mode "RGB" or "L", composited on `BACKGROUND`."""
  mode = "RGB" if channels == 3 else "L"
  if image.mode.startswith("I"):  # 16-bit grey: Pillow's own conversion clips to 255
    deep = np.asarray(image)
    grey = Image.fromarray((deep >> 8).astype(np.uint8))
    if "transparency" in image.info:  # one 16-bit level stands for "nothing here"
      grey = Image.fromarray(
        np.where(
          deep == image.info["transparency"], BACKGROUND, np.asarray(grey)
        ).astype(np.uint8)
      )
    return grey.convert(mode)
  if image.has_transparency_data:
    pixels = np.asarray(image.convert("RGBA")).astype(np.uint16)
    colour, alpha = pixels[..., :3], pixels[..., 3:]
    # Rounded to the nearest, exact for alpha 0 and 255; at most 65152, so 16 bits do.
    mixed = (colour * alpha + BACKGROUND * (255 - alpha) + 127) // 255
    return Image.fromarray(mixed.astype(np.uint8)).convert(mode)
  return image.convert(mode)
