"""The dry run against closed forms, the optimizer's own table and the compiler."""

import re

import jax
import numpy as np
import pytest
import tiny

from vit_jax import devices, feed, summary, train
from vit_jax.config import ConfigError


def prepared(**changes):
  return train.prepare(tiny.make(**changes))


def parameters(job):
  hyper = jax.tree.map(lambda leaf: leaf[0], job.hypers)
  return jax.eval_shape(job.steps.init, hyper)["params"]


@pytest.fixture(scope="module")
def said():
  """The whole summary of one run, its job, and the bytes of arrays that it left."""
  job = prepared(
    model__stride=2,
    model__pad=1,
    model__registers=1,
    data__val=0.25,
    optim__accumulate=2,
    train__length="8 epochs",
    train__checkpoint_every="1 epoch",
  )
  before = {id(array) for array in jax.live_arrays()}
  text = summary.text(job)
  left = sum(a.nbytes for a in jax.live_arrays() if id(a) not in before)
  return text, job, left


def line(text, start):
  """Returns the cells of the line whose first cell this is."""
  lines = [
    re.split(r"\s{2,}", row.strip())
    for row in text.splitlines()
    if row.strip().startswith(start)
  ]
  assert len(lines) == 1, f"{start!r}: {lines}"
  return lines[0]


def test_data_and_patches(said):
  text, job, _ = said
  data = job.data
  assert line(text, "images") == ["images", "8 x 8 x 3"]
  for name in ("train", "val", "test"):
    assert line(text, f"{name} ")[1] == f"{len(getattr(data, name)):,}"
  assert line(text, "grid")[1] == "4 x 4 = 16 patches"
  assert line(text, "tokens")[1].startswith("18:")
  # Of 8 rows of pixels two (the first, the last) are seen by one row of windows less.
  least = int((job.model.geometry.coverage() == 1).sum())
  assert line(text, "windows on a pixel")[1].startswith(f"1 to 4; 1 on {least} of 64")


def test_parameters_and_cost(said):
  """Width 16, two blocks, MLP x2, 18 tokens, 3 channels."""
  text, job, _ = said
  width, classes = 16, len(job.data.classes)
  block = 8 * width**2 + 11 * width
  total = 48 * width + width + 18 * width + width + 2 * block + 2 * width
  total += (width + 1) * classes
  assert line(text, "total")[1] == f"{total:,}"
  assert line(text, "2 blocks")[1:] == [f"{2 * block:,}", f"{block:,} each"]
  tokens = 18
  macs = 16 * 48 * width + 2 * (tokens * 8 * width**2 + 2 * tokens**2 * width)
  macs += width * classes
  assert line(text, "MACs")[1] == f"{macs:,}"
  examples = job.schedule.total * 8
  assert line(text, "FLOPs")[1] == f"{6 * macs * examples:.4g}"
  # Two layers, two heads, 4 bytes; micro-batches of 4.
  assert line(text, "attention scores")[1] == f"{2 * 2 * 4 * tokens**2 / 1024:.4g} KiB"
  assert f"{4 * 2 * 2 * 4 * tokens**2 / 1024:.4g} KiB" in text


def test_plan(said):
  text, job, _ = said
  total = 8 * -(-len(job.data.train) // 8)
  assert abs(job.schedule.total - total) <= 8
  total = job.schedule.total
  assert line(text, "steps")[1] == f"{total:,} of 8 examples"
  assert line(text, "epochs")[1].startswith("8 of ")
  assert line(text, "warm-up")[1] == "2 steps"
  assert line(text, "evaluate")[1] == "at the end"
  assert line(text, "save")[1].startswith(f"every {-(-len(job.data.train) // 8)} ")
  last = 1e-2 * (1 + np.cos(np.pi * (total - 1 - 2) / (total - 2))) / 2
  assert line(text, "learning rate")[1] == "0 at the first step"
  assert "0.01 at its peak, step 3\n" in text
  found = re.search(r"(\S+) at the last step", text)[1]
  np.testing.assert_allclose(float(found), last, rtol=1e-3)
  assert "0 after it" in text


def test_nothing_large_is_allocated(said):
  _, job, left = said
  assert left < job.data.train.images.nbytes / 10


def test_memory(said):
  """The program holds state, data and batch; the state is written in place."""
  text, job, _ = said
  state = jax.eval_shape(jax.vmap(job.steps.init), job.hypers)
  state = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
  data = job.data.train.images.nbytes + job.data.train.labels.nbytes
  figures = {
    name: float(line(text, name)[1].split()[0])
    * {"B": 1, "KiB": 2**10, "MiB": 2**20}[line(text, name)[1].split()[1]]
    for name in ("arguments", "of these, in place", "outputs", "temporary", "at most")
  }
  # Batch numbers and settings are small; the compiler pads each array.
  assert state + data <= figures["arguments"] * 1.001
  assert figures["arguments"] < (state + data) * 1.1 + 10_000
  np.testing.assert_allclose(figures["of these, in place"], state, rtol=0.05)
  assert figures["temporary"] > 0
  assert figures["at most"] >= figures["arguments"]


@pytest.mark.parametrize("parallel", ["jit", "pmap"])
def test_the_program_is_the_one_that_runs(parallel, monkeypatch):
  """What is compiled for has the shapes, types and places of what the loop feeds."""
  job = train.prepare(
    tiny.make(train__parallel=parallel), members=[{"seed": 1}, {"seed": 2}]
  )
  layout = devices.make(job.config, job.steps, 2)
  seen = []

  class Program:
    def lower(self, *arguments):
      seen.append(arguments)
      return self

    def compile(self):
      return self

  monkeypatch.setattr(layout, "_train", Program())
  monkeypatch.setattr(summary.devices, "make", lambda *_: layout)
  summary.compiled(job)
  ((state, *arguments),) = seen
  source = feed.make(job, layout, 0)
  fed = (
    source.next(0, 5),
    layout.put(job.hypers),
    *source.data,
    np.array([0, 5], np.int32),
  )

  def described(leaf):
    return leaf.shape, np.dtype(leaf.dtype)

  assert jax.tree.map(described, tuple(arguments)) == jax.tree.map(described, fed)
  if parallel == "jit":
    for leaf, real in zip(jax.tree.leaves(arguments[0]), jax.tree.leaves(fed[0])):
      assert leaf.sharding == real.sharding
  if parallel == "jit":
    shapes = jax.eval_shape(jax.vmap(job.steps.init), job.hypers)
    assert jax.tree.map(described, state) == jax.tree.map(described, shapes)
  else:
    assert {leaf.shape[:2] for leaf in jax.tree.leaves(state)} == {(4, 2)}


def test_blocks_that_are_alike_share_a_line():
  job = prepared(model__depth=3)
  rows = {row[0]: row[1:] for row in summary.groups(job, parameters(job))}
  assert rows["block_0..2/mlp/up/kernel"] == ("16x32", "yes", "1")
  assert rows["block_0..2/mlp/up/bias"] == ("32", "no", "1")
  assert rows["positions"] == ("5x16", "no", "1")
  assert not any(re.match(r"block_\d/", name) for name in rows)


def test_blocks_that_differ_do_not():
  job = prepared(
    model__depth=4, optim__freeze="block_[013]/attention", optim__layer_decay=0.5
  )
  rows = {row[0]: row[1:] for row in summary.groups(job, parameters(job))}
  assert rows["block_0/mlp/up/kernel"] == ("16x32", "yes", "0.0625")
  assert rows["block_3/mlp/up/kernel"] == ("16x32", "yes", "0.5")
  assert rows["block_2/attention/out/kernel"] == ("2x8x16", "yes", "0.25")
  assert rows["block_1/attention/out/kernel"] == ("2x8x16", "frozen", "")
  uniform = prepared(model__depth=4, optim__freeze="block_[013]/attention")
  names = [row[0] for row in summary.groups(uniform, parameters(uniform))]
  assert "block_2/attention/out/bias" in names
  table = job.optimizer.config
  assert table.freeze is not None


def test_ranges():
  assert summary._ranges([3]) == "3"
  assert summary._ranges([2, 0, 1]) == "0..2"
  assert summary._ranges([0, 2, 3, 4, 7]) == "{0,2..4,7}"


def test_a_pattern_without_effect_is_refused():
  job = prepared(optim__freeze="blok")
  with pytest.raises(ConfigError, match="blok"):
    summary.groups(job, parameters(job))
