"""Folders of pictures, one folder a class.

    dir/train/CLASS/*.png    sorted by path, folders within a class included
    dir/test/CLASS/*.png     a class may be missing; what lies in no class is unlabelled
    dir/val/CLASS/*.png      or validation/; the test split where there is no test/

The classes are the folders of train, sorted by name. Hidden files do not count.
"""

import dataclasses
import hashlib
import logging
import os
from pathlib import Path

import numpy as np

from vit_jax import config
from vit_jax.config import ConfigError
from vit_jax.data import images as pictures
from vit_jax.data import lazy
from vit_jax.data.split import Dataset, Split
from vit_jax.errors import listed


def load(data: config.Data, seed: int) -> Dataset:
  """Loads a folder with a split for training.

  Raises:
    ConfigError: another layout, pictures of several sizes without `data.image_size`, or
      unreadable ones that are not to be skipped.
  """
  del seed
  root = _root(data)
  found = find(root)
  classes = tuple(sorted(found["train"].pictures))
  splits = _splits(data, found, classes)
  if lazy.fits(splits):
    fingerprint = lazy.content_fingerprint(splits, classes)
  else:
    digest = hashlib.sha256()
    for path in sorted(
      path for split in splits.values() for path in split.images.paths
    ):
      name = os.fsencode(os.path.relpath(path, root))
      digest.update(name + f"\0{os.lstat(path).st_size}\0".encode())
    fingerprint = digest.hexdigest()
  splits, skipped = lazy.decoded(data, splits)
  for k, name in enumerate(classes):
    if not (splits["train"].labels == k).any():
      raise ConfigError(f"{root}/train/{name}: none of its pictures can be read")
  return Dataset(
    name=data.name,
    train=splits["train"],
    val=splits.get("val"),
    test=splits["test"],
    classes=classes,
    mean=(0.5,) * 3,
    std=(0.5,) * 3,
    fingerprint=fingerprint,
    skipped=skipped,
    note="; ".join(part.summary(role) for role, part in found.items()),
  )


def load_for_classes(
  data: config.Data, classes: tuple[str, ...], channels: int = 3
) -> Split:
  """Loads class folders for the evaluation of a model that was trained elsewhere.

  Args:
    data: `data.dir` holds `CLASS/*.png` itself, without train/ or test/; not every class
      of the model need be there. What lies in no class folder is unlabelled.
    classes: names of the classes that the model knows, in the order of its labels.
    channels: 3 for RGB, 1 for grey.

  Returns:
    Images [n, h, w, channels] and, found by name, labels that are places in `classes`.

  Raises:
    ConfigError: a folder that is no class of the model, no labelled picture, or as
      `load`.
  """
  root = _root(data)
  found = _found(root)
  unknown = sorted(set(found.pictures) - set(classes) - {""})
  if unknown:
    below = [
      str(root / name) for name in ("test", "val", "validation") if name in unknown
    ]
    raise ConfigError(
      f"{root} has folders that are no class of the model: {listed(unknown)}; it knows "
      f"{listed(classes)}" + (f"; try {below[0]}" if below else "")
    )
  if not any(paths for name, paths in found.pictures.items() if name):
    raise ConfigError(f"{root} has no pictures in class folders; {_hint(root)}")
  splits, skipped = lazy.decoded(
    data, _splits(data, {"test": found}, classes, channels)
  )
  logging.info("%s", found.summary("test"))
  if skipped:
    logging.warning("%s: %d pictures cannot be read and are left out", root, skipped)
  return splits["test"]


def _root(data):
  if data.dir is None:
    raise ConfigError('data.name="folder" needs data.dir')
  return _existing(data.dir)


def _existing(folder):
  root = Path(folder).expanduser()
  if not root.is_dir():
    raise ConfigError(f"data.dir={str(root)!r} is not a folder")
  return root


def _splits(data, found, classes, channels=3):
  """Returns role -> `Split`, undecoded, of role -> `Found`."""
  listed = {
    role: [(name, path) for name, paths in sorted(f.pictures.items()) for path in paths]
    for role, f in found.items()
  }
  size = data.image_size and tuple(data.image_size)
  if size is None:
    size = _common_size([path for rows in listed.values() for _, path in rows])
  ids = {name: k for k, name in enumerate(classes)} | {"": -1}
  return {
    role: Split(
      lazy.Files(tuple(path for _, path in rows), size, channels, data.interpolation),
      np.array([ids[name] for name, _ in rows], np.int32),
    )
    for role, rows in listed.items()
  }


@dataclasses.dataclass(frozen=True)
class Found:
  """What one split's folder holds.

  Attributes:
    path: the folder.
    pictures: class -> sorted paths; "" for pictures that lie in no class folder.
    ignored: files of other kinds.
  """

  path: Path
  pictures: dict[str, list[str]]
  ignored: list[str]

  def summary(self, role: str) -> str:
    counts = {name or "(no class)": len(paths) for name, paths in self.pictures.items()}
    if len(counts) <= 20:
      text = ", ".join(f"{name} {n}" for name, n in sorted(counts.items()))
    else:
      least, most = min(counts.values()), max(counts.values())
      text = f"{len(counts)} classes of {least} to {most}"
    text = f"{role} ({self.path.name}/): {text}"
    if self.ignored:
      names = ", ".join(self.ignored[:3]) + (", ..." if len(self.ignored) > 3 else "")
      text += f"; {len(self.ignored)} files ignored ({names})"
    return text


def find(root: str | os.PathLike) -> dict[str, Found]:
  """Lists a folder data set; decodes nothing.

  Returns:
    "train", "test" and, where there is one, "val".

  Raises:
    ConfigError: it is not laid out as `load` says; the message shows what is there.
  """
  root = _existing(root)
  inside = sorted(p.name for p in root.iterdir() if p.is_dir())
  layout = "expected train/CLASS/*.jpg and test/CLASS/*.jpg (or val/, validation/)"
  if "train" not in inside:
    raise ConfigError(f"data.dir={str(root)!r} has no train/: {layout}; {_hint(root)}")
  validation = [name for name in ("val", "validation") if name in inside]
  if len(validation) > 1:
    raise ConfigError(f"{root} has both val/ and validation/: keep one of them")
  if "test" in inside:
    roles = {"train": "train", "test": "test"}
    if validation:
      roles["val"] = validation[0]
  elif validation:
    roles = {"train": "train", "test": validation[0]}
  else:
    raise ConfigError(
      f"data.dir={str(root)!r} has only {listed(inside)}: {layout}; {_hint(root)}"
    )
  tree = {role: _found(root / name) for role, name in roles.items()}
  train = tree["train"]
  classes = sorted(name for name in train.pictures if name)
  if len(classes) < 2:
    loose = len(train.pictures[""]) if "" in train.pictures else 0
    raise ConfigError(
      f"{train.path} has {len(classes)} class folders ({listed(classes)}) and {loose} "
      f"pictures outside them; expected two classes or more: {layout}"
    )
  if "" in train.pictures:
    raise ConfigError(
      f"{train.path} has pictures in no class folder, such as {train.pictures[''][0]}; "
      "training needs a label for each"
    )
  for name in classes:
    if not train.pictures[name]:
      raise ConfigError(
        f"{train.path}/{name} has no pictures ({', '.join(pictures.EXTENSIONS)}); "
        "remove the folder or fill it"
      )
  for role, found in tree.items():
    extra = sorted(set(found.pictures) - set(classes) - {""})
    if extra:
      raise ConfigError(
        f"{found.path} has classes that train/ lacks: {listed(extra)}; train/ has "
        f"{listed(classes)}"
      )
    if not any(found.pictures.values()):
      raise ConfigError(f"{role} folder {found.path} has no pictures")
  return tree


def check(root: str | os.PathLike) -> list[tuple[str, str]]:
  """Decodes every picture of a folder data set.

  Returns:
    (path, reason) of each that training would refuse.
  """
  paths = [
    path
    for found in find(root).values()
    for paths in found.pictures.values()
    for path in paths
  ]
  return pictures.failures(paths)


def _found(folder):
  """Walks one split; hidden files and folders do not count."""
  found, ignored = {}, []

  def sort_in(label, path):
    if Path(path).suffix.lower() in pictures.EXTENSIONS:
      found.setdefault(label, []).append(str(path))
    else:
      ignored.append(os.path.relpath(path, folder))

  for entry in folder.iterdir():
    if entry.name.startswith("."):
      continue
    if not entry.is_dir():
      sort_in("", entry)
      continue
    found[entry.name] = []
    for place, folders, files in os.walk(entry):
      folders[:] = [name for name in folders if not name.startswith(".")]
      for name in files:
        if not name.startswith("."):
          sort_in(entry.name, os.path.join(place, name))
  # The order of a directory differs between machines.
  found = {label: sorted(paths) for label, paths in found.items()}
  return Found(folder, found, sorted(ignored))


def _hint(root):
  """What the user may have meant."""
  inside = sorted(p for p in root.iterdir() if p.is_dir())
  below = [p for p in inside if (p / "train").is_dir()]
  if below:
    return f"try data.dir={str(below[0])!r}"
  loose = sum(p.suffix.lower() in pictures.EXTENSIONS for p in root.iterdir())
  if loose:
    return f"found {loose} pictures with no class folder"
  if root.name == "train":
    return f"try data.dir={str(root.parent)!r}"
  return f"found folders: {listed([p.name for p in inside])}"


def _common_size(paths):
  """Returns the (height, width) that all readable pictures share."""

  def size_of(path):
    try:
      return pictures.shape(path)
    except (pictures.ImageError, OSError):
      return None  # `lazy.decoded` counts or refuses it

  sizes = dict(zip(paths, pictures.in_threads(size_of, paths)))
  distinct = {size: path for path, size in sizes.items() if size is not None}
  if len(distinct) == 1:
    return next(iter(distinct))
  if not distinct:
    raise ConfigError(f"none of {len(paths)} pictures can be read, such as {paths[0]}")
  (first, one), (second, other) = list(distinct.items())[:2]
  raise ConfigError(
    f"pictures differ in size ({one} is {first[0]}x{first[1]}, {other} {second[0]}x"
    f"{second[1]}): set data.image_size"
  )
