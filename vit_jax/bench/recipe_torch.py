"""The recipe of configs/fashion_mnist.py in PyTorch, as a user of PyTorch would write it.

    python -m vit_jax.bench.recipe_torch FOLDER LENGTH SEED

timm's VisionTransformer behind the same convolutional stem, `torch.optim.Muon` and
`AdamW`, augmentation of whole batches, a moving average; sizes and rates come from our
config. After every epoch a line of FOLDER/metrics.jsonl says the test accuracy of the
parameters and of their average. Three things are PyTorch's own: query, key and value are
one matrix (timm; each third is drawn like a matrix of its own), Muon's iteration runs in
bfloat16, and nothing is saved. It runs as it is, without `torch.compile`, on the CPU.
"""

import functools
import json
import math
import pathlib
import sys

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from vit_jax import config as config_lib
from vit_jax.bench import sizes
from vit_jax.data import datasets


class Stem(nn.Module):
  """3x3 convolutions of stride 2 with LayerNorm and GELU, then a linear map: the arguments
  are those that timm gives its embedding of patches."""

  def __init__(self, img_size, patch_size, in_chans, embed_dim, **_):
    super().__init__()
    steps = patch_size.bit_length() - 1
    widths = [max(8, embed_dim >> (steps - 1 - i)) for i in range(steps)]
    self.convolutions = nn.ModuleList(
      nn.Conv2d(i, o, 3, 2, bias=False) for i, o in zip([in_chans, *widths], widths)
    )
    self.norms = nn.ModuleList(nn.LayerNorm(width, eps=1e-6) for width in widths)
    self.project = nn.Linear(widths[-1], embed_dim)
    self.num_patches = (img_size // patch_size) ** 2

  def forward(self, x):
    for convolution, norm in zip(self.convolutions, self.norms):
      x = convolution(functional.pad(x, (1, 0, 1, 0)))
      x = norm(x.permute(0, 2, 3, 1))
      x = functional.gelu(x, approximate="tanh").permute(0, 3, 1, 2)
    return self.project(x.flatten(2).transpose(1, 2))


def make_model(config, dataset):
  m = config.model
  model = VisionTransformer(
    img_size=dataset.train.images.shape[1],
    patch_size=m.patch.height,
    in_chans=dataset.train.images.shape[3],
    num_classes=len(dataset.classes),
    embed_dim=m.width,
    depth=m.depth,
    num_heads=m.heads,
    mlp_ratio=m.mlp_ratio,
    class_token=False,
    global_pool="avg",
    fc_norm=False,  # the norm comes before the mean
    weight_init="jax",
    embed_layer=Stem,
    act_layer=functools.partial(nn.GELU, approximate="tanh"),
  )
  for block in model.blocks:
    for third in block.attn.qkv.weight.chunk(3):
      nn.init.xavier_uniform_(third)
  return model


def make_optimizers(config, model):
  """Returns Muon for the matrices of blocks and AdamW for all else."""
  o = config.optim
  names = dict(model.named_parameters())
  matrices = [p for n, p in names.items() if n.startswith("blocks.") and p.ndim == 2]
  others = {n: p for n, p in names.items() if all(p is not m for m in matrices)}
  decayed = [p for n, p in others.items() if p.ndim > 1 and n != "pos_embed"]
  rest = [p for p in others.values() if all(p is not d for d in decayed)]
  return [
    torch.optim.Muon(
      matrices,
      lr=o.lr,
      weight_decay=o.weight_decay,
      momentum=o.momentum,
      adjust_lr_fn="match_rms_adamw",
    ),
    torch.optim.AdamW(
      [{"params": decayed}, {"params": rest, "weight_decay": 0.0}],
      lr=o.lr,
      betas=(o.momentum, o.second_momentum),
      eps=o.epsilon,
      weight_decay=o.weight_decay,
      fused=True,
    ),
  ]


def augmented(images, most):
  """Shifts each image by up to `most` pixels, zeros moving in, and mirrors half of them."""
  count, _, height, width = images.shape
  padded = functional.pad(images, (most,) * 4)
  top, left = torch.randint(0, 2 * most + 1, (2, count, 1, 1))
  rows = top + torch.arange(height)[:, None]
  columns = torch.arange(width).expand(count, 1, width)
  columns = torch.where(torch.rand(count, 1, 1) < 0.5, columns.flip(-1), columns)
  return padded[torch.arange(count)[:, None, None], :, rows, left + columns].permute(
    0, 3, 1, 2
  )


def accuracy(model, images, labels, size):
  model.eval()
  with torch.inference_mode():
    found = [model(part).argmax(-1) for part in images.split(size)]
  model.train()
  return (torch.cat(found) == labels).double().mean().item()


def main(folder, length, seed):
  changes = {"train.length": length, "seed": int(seed)}
  config = config_lib.override(sizes.recipe("fashion_mnist"), changes)
  followed = (config.model.tokenizer, config.optim.name, config.optim.schedule)
  assert followed == ("conv", "muon", "cosine"), followed
  assert config.augment.flip and config.optim.accumulate == 1
  torch.manual_seed(config.seed)
  dataset = datasets.load(config.data, config.seed)
  mean, std = (torch.tensor(x)[:, None, None] for x in (dataset.mean, dataset.std))
  (images, labels), (tests, truths) = (
    (
      torch.from_numpy(part.images.copy()).permute(0, 3, 1, 2) / 255,
      torch.from_numpy(part.labels.copy()).long(),
    )
    for part in (dataset.train, dataset.test)
  )
  tests = (tests - mean) / std

  model = make_model(config, dataset)
  average = AveragedModel(
    model, multi_avg_fn=get_ema_multi_avg_fn(config.optim.ema), use_buffers=True
  )
  optimizers = make_optimizers(config, model)
  batch, epochs = config.data.batch_size, int(config.train.length.amount)
  total = epochs * math.ceil(len(labels) / batch)
  warmup = config.optim.warmup.amount / 100 * total

  def share(step):
    if step < warmup:
      return step / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))

  schedules = [torch.optim.lr_scheduler.LambdaLR(o, share) for o in optimizers]
  rows = pathlib.Path(folder) / "metrics.jsonl"
  rows.parent.mkdir(parents=True)
  for _ in range(epochs):
    for chosen in torch.randperm(len(labels)).split(batch):
      pictures = augmented(images[chosen], config.augment.crop)
      pictures = (pictures - mean) / std
      for optimizer in optimizers:
        optimizer.zero_grad()
      functional.cross_entropy(model(pictures), labels[chosen]).backward()
      nn.utils.clip_grad_norm_(model.parameters(), config.optim.clip_norm)
      for optimizer, schedule in zip(optimizers, schedules):
        optimizer.step()
        schedule.step()
      average.update_parameters(model)
    size = config.data.eval_batch_size
    row = {
      "test/accuracy": accuracy(model, tests, truths, size),
      "test_ema/accuracy": accuracy(average, tests, truths, size),
    }
    with rows.open("a") as file:
      file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
  main(*sys.argv[1:])
