"""Reading pictures: files to batches of one size, beside PyTorch's loader."""

import pathlib
import tempfile

import numpy as np

from vit_jax.bench import limits, race, report
from vit_jax.bench.race import Contender, Runner

OURS, DECODE = "vit_jax", "limit: decoding alone"
COUNT, BATCH, SIZE = 256, 32, 224
ORIGINAL = (375, 500)  # height and width, as the mean picture of ImageNet has


def run(rounds) -> report.Result:
  """Times an epoch of JPEG files: read, decoded, resized, cropped, batched."""
  with tempfile.TemporaryDirectory() as folder:
    _write_pictures(pathlib.Path(folder))
    starts = {
      OURS: lambda: Contender(ours, folder, needs=("vit_jax.data.batches", "grain")),
      "PyTorch, 2 processes": lambda: Contender(
        torch_loader, folder, needs=("torch", "torchvision")
      ),
      DECODE: lambda: Contender(decode, folder, needs=("PIL.Image",)),
      "limit: copy": limits.copy,
    }
    field = race.contenders(starts, OURS)
    seconds = race.race(field, rounds)
    for contender in field.values():
      contender.close()
    bandwidth = [
      field["limit: copy"].facts["bytes"] / s / 1e9 for s in seconds["limit: copy"]
    ]
    rows = []
    for name in seconds:
      if name == "limit: copy":
        continue
      rows.append(
        {
          "reader": name,
          "images/s": race.spread([COUNT / s for s in seconds[name]]),
          "we are x times as fast": None
          if name == OURS
          else race.spread(race.ratios(seconds[OURS], seconds[name])),
        }
      )
  return report.Result(
    name="data",
    title=f"{COUNT} JPEG files of {ORIGINAL[1]}x{ORIGINAL[0]} pixels to {SIZE}x{SIZE}",
    rows=rows,
    limits={"copy, GB/s read and written": race.spread(bandwidth)},
    notes={"batch": BATCH, "rounds": rounds},
    raw={"seconds of each round": seconds},
  )


def ours(folder):
  """Our stream, as a training run reads it."""
  from vit_jax.data import batches, lazy
  from vit_jax.data.split import Split

  paths = tuple(map(str, sorted(pathlib.Path(folder).iterdir())))
  files = lazy.Files(paths, (SIZE, SIZE), 3, "bicubic")
  split = Split(files, np.zeros(len(paths), np.int32))
  order = batches.Order(0, len(paths))

  def go():
    # A stream of its own: one that went on would read ahead while others are timed.
    steps = COUNT // BATCH
    stream = batches.Stream(
      split, order, step=0, size=BATCH, own=slice(0, BATCH), total=steps
    )
    for _ in range(steps):
      stream.next(1)

  return Runner(go, {})


def torch_loader(folder):
  """PyTorch's `DataLoader` with torchvision's transforms, two processes."""
  import torch
  from PIL import Image
  from torchvision import transforms

  transform = transforms.Compose(
    [
      transforms.Resize(SIZE, interpolation=transforms.InterpolationMode.BICUBIC),
      transforms.CenterCrop(SIZE),
      transforms.PILToTensor(),
    ]
  )
  paths = sorted(pathlib.Path(folder).iterdir())
  loader = torch.utils.data.DataLoader(
    _Files(paths, transform, Image),
    BATCH,
    shuffle=True,
    num_workers=2,
    persistent_workers=True,
    multiprocessing_context="fork",
  )

  def go():
    for _ in loader:
      pass

  return Runner(go, {})


class _Files:
  def __init__(self, paths, transform, image):
    self._paths, self._transform, self._image = paths, transform, image

  def __len__(self):
    return len(self._paths)

  def __getitem__(self, i):
    return self._transform(self._image.open(self._paths[i]).convert("RGB"))


def decode(folder):
  """Decoding alone, in threads."""
  from PIL import Image

  from vit_jax.data.images import in_threads

  paths = sorted(pathlib.Path(folder).iterdir())
  return Runner(lambda: in_threads(lambda path: Image.open(path).load(), paths), {})


def _write_pictures(folder):
  """Writes pictures whose files are as large as those of photographs (about 100 kB)."""
  from PIL import Image

  random = np.random.default_rng(0)
  for i in range(COUNT):
    small = random.integers(0, 256, (24, 32, 3), np.uint8)
    image = Image.fromarray(small).resize(ORIGINAL[::-1], Image.Resampling.BICUBIC)
    noise = random.normal(0, 8, (*ORIGINAL, 3))
    pixels = np.clip(np.asarray(image) + noise, 0, 255).astype(np.uint8)
    Image.fromarray(pixels).save(folder / f"{i:04}.jpg", quality=90)
