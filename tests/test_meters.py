"""When a profile begins and ends."""

import jax
import pytest

from vit_jax import meters


@pytest.mark.parametrize(
  "calls, expected",
  [
    ([20, 20, 20], [("start", 20), ("stop", 40)]),
    ([1] * 10, [("start", 1), ("stop", 6)]),
    ([2, 1], [("start", 2), ("stop", 3)]),  # the run ends before
    ([100], []),
  ],
)
def test_profile_of_the_calls_after_the_first(monkeypatch, tmp_path, calls, expected):
  step, seen = 0, []
  monkeypatch.setattr(
    jax.profiler, "start_trace", lambda _: seen.append(("start", step))
  )
  monkeypatch.setattr(jax.profiler, "stop_trace", lambda: seen.append(("stop", step)))
  tracer, silent = meters.Tracer(tmp_path), meters.Tracer(None)
  for count in calls:
    for one in (tracer, silent):
      one.before(step)
    step += count
    for one in (tracer, silent):
      one.after(step, ())
  tracer.close()
  silent.close()
  assert seen == expected


def test_a_run_of_one_call_says_that_it_has_no_profile(tmp_path, caplog):
  tracer = meters.Tracer(tmp_path)
  tracer.before(0)
  tracer.after(20, ())
  tracer.close()
  assert "no profile" in caplog.text and not list(tmp_path.iterdir())
