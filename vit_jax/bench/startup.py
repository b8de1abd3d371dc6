"""Seconds from the command line: imports, --help, the first step."""

import os
import pathlib
import subprocess
import sys
import tempfile
import time

from vit_jax.bench import race, report, sizes

# What a peer's user waits for before the first step: imports, model, one step.
TIMM_FIRST_STEP = """
import torch, timm
model = timm.models.vision_transformer.VisionTransformer(
  img_size=8, patch_size=1, in_chans=1, num_classes=10, embed_dim=48, depth=3,
  num_heads=2, mlp_ratio=2)
optimizer = torch.optim.AdamW(model.parameters())
images, labels = torch.randn(128, 1, 8, 8), torch.arange(128) % 10
torch.nn.functional.cross_entropy(model(images), labels).backward()
optimizer.step()
"""


def run(rounds) -> report.Result:
  """Times commands as whole processes; the first step until its row is written."""
  with tempfile.TemporaryDirectory() as folder:
    folder = pathlib.Path(folder)
    commands = {
      "python -c pass": _whole([sys.executable, "-c", "pass"]),
      "import jax": _whole([sys.executable, "-c", "import jax"]),
      "import vit_jax": _whole([sys.executable, "-c", "import vit_jax"]),
      "train.py --help": _whole([sys.executable, sizes.TRAIN, "--help"]),
      "first step of digits, all compiled before": _first_row(folder, cold=False),
      "first step of digits, nothing compiled": _first_row(folder, cold=True),
      "import timm": _whole([sys.executable, "-c", "import timm"]),
      "timm: first step of that size": _whole([sys.executable, "-c", TIMM_FIRST_STEP]),
    }
    seconds = {name: [] for name in commands}
    for turn in range(rounds + 1):  # the first fills caches, of files too
      for name, command in list(commands.items()):
        taken = command()
        if taken is None:
          print(f"{name} is left out: it failed", file=sys.stderr)
          del commands[name], seconds[name]
        elif turn:
          seconds[name].append(taken)
  return report.Result(
    name="startup",
    title="from the command line",
    rows=[{"command": name, "seconds": race.spread(s)} for name, s in seconds.items()],
    limits={},
    notes={"rounds": rounds},
    raw={"seconds of each round": seconds},
    plot=("seconds", None),
  )


def _whole(command):
  """Returns a function that runs a command and returns its seconds; None: it failed."""

  def call():
    begin = time.perf_counter()
    done = subprocess.run(command, capture_output=True)
    # --help of absl ends with 1.
    known = (0, 1) if command[-1] == "--help" else (0,)
    return time.perf_counter() - begin if done.returncode in known else None

  return call


def _first_row(folder, cold):
  count = 0

  def call():
    nonlocal count
    count += 1
    name = f"{'cold' if cold else 'warm'}-{count}"
    cache = folder / (f"cache-{count}" if cold else "cache")
    metrics = folder / name / "metrics.jsonl"
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(cache)}
    command = sizes.train_command(
      "digits", workdir=folder / name, config__train__log_every="1 steps"
    )
    begin = time.perf_counter()
    process = subprocess.Popen(
      command,
      env=environment,
      stdout=subprocess.DEVNULL,
      stderr=subprocess.DEVNULL,
    )
    try:
      while not (metrics.exists() and metrics.stat().st_size):
        if process.poll() is not None:
          return None
        time.sleep(0.02)
      return time.perf_counter() - begin
    finally:
      process.kill()
      process.wait()

  return call
