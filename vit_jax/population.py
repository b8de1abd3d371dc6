"""From one step of one member to many steps of many members.

A run alone is a population of one. Members lie along the leading axis S of every leaf
of the state; one after another inside the program (in place, so that the state is held
once), or several at once by `vmap`.
"""

import functools

import jax
import jax.numpy as jnp


def over_members(fn, at_once: int):
  """Maps `fn(state, mapped, shared) -> (state, out)` over members.

  Args:
    fn: a function of one member.
    at_once: members that run side by side; 1: one after another.

  Returns:
    The same function of all members: `state`, `mapped` and `out` have a leading axis S,
    `shared` is one for all.
  """

  def of_one(states, mapped, shared):
    """Like `vmap` over a group of one, without a batch axis: the products are exactly
    those of `fn`."""
    first = jax.tree.map(lambda leaf: leaf[0], (states, mapped))
    return jax.tree.map(lambda leaf: leaf[None], fn(*first, shared))

  def call(states, mapped, shared):
    members = len(jax.tree.leaves(mapped)[0])
    size = min(at_once, members)
    of_group = of_one if size == 1 else jax.vmap(fn, (0, 0, None))
    if size == members:  # no loop, whose carry would be one more copy of the state
      return of_group(states, mapped, shared)

    def take(tree, i):
      return jax.tree.map(
        lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, i * size, size), tree
      )

    def put(tree, part, i):
      return jax.tree.map(
        lambda leaf, value: jax.lax.dynamic_update_slice_in_dim(
          leaf, value, i * size, 0
        ),
        tree,
        part,
      )

    def body(i, carry):
      states, outs = carry
      state, out = of_group(take(states, i), take(mapped, i), shared)
      return put(states, state, i), put(outs, out, i)

    _, out = jax.eval_shape(of_group, take(states, 0), take(mapped, 0), shared)
    outs = jax.tree.map(
      lambda leaf: jnp.zeros((members, *leaf.shape[1:]), leaf.dtype), out
    )
    return jax.lax.fori_loop(0, members // size, body, (states, outs))

  return call


def train_many(train_step, at_once: int, reduce):
  """Returns `call(states, batches, hypers, own, data, span) -> (states, metrics)`.

  `batches` has axes [S, K, B]; `span` is [first step, end], of at most K steps (traced,
  so that one program serves every length of call); metrics have axes [S, K]. A member
  whose own step number is behind has ended, at a step that was not finite or by
  `hyper["active"]`: nothing of it changes, and its metrics are 0.
  """

  # Traced once, though the loops below ask for its shapes as well.
  @functools.partial(jax.jit, inline=True)
  def one_step(state, batch, hyper):
    return train_step(state, batch, hyper, reduce)

  def member(state, mapped, shared):
    batches, hyper, own = mapped
    data = {**shared["data"], **own}
    first, end = shared["span"]
    steps = len(batches["row"])

    def step(k, state):
      batch = fetch(data, jax.tree.map(lambda leaf: leaf[k], batches))
      return one_step(state, batch, hyper)

    _, metrics = jax.eval_shape(lambda state: step(0, state), state)
    history = jax.tree.map(lambda leaf: jnp.zeros((steps,), leaf.dtype), metrics)

    def goes_on(carry):
      now, state, _ = carry
      return (now < end) & (state["step"] == now) & hyper["active"]

    def body(carry):
      now, state, history = carry
      k = now - first
      state, metrics = step(k, state)
      history = jax.tree.map(lambda h, m: h.at[k].set(m), history, metrics)
      return now + 1, state, history

    return jax.lax.while_loop(goes_on, body, (first, state, history))[1:]

  mapped_call = over_members(member, at_once)

  def call(states, batches, hypers, own, data, span):
    shared = {"data": data, "span": span}
    return mapped_call(states, (batches, hypers, own), shared)

  return call


def evaluate_many(eval_step, at_once: int):
  """Returns `call(params, hypers, own, batch) -> values`, [S, B] each; the images of
  `own` are each member's, those of `batch` are for all. A member that is not active is
  not evaluated: its values are 0."""

  def member(state, mapped, shared):
    params, hyper, own = mapped
    batch = {**shared, **own}

    def evaluate():
      return eval_step(params, batch, hyper)

    def nothing():
      shapes = jax.eval_shape(evaluate)
      return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    return state, jax.lax.cond(hyper["active"], evaluate, nothing)

  mapped_call = over_members(member, at_once)

  def call(params, hypers, own, batch):
    return mapped_call((), (params, hypers, own), batch)[1]

  return call


def fetch(data, batch):
  """Returns a batch with its images: gathered from the resident data by `index`, or as
  they came where they stream."""
  if "image" in batch:
    return batch
  index = batch["index"]
  return {
    "image": data["image"][index],
    "label": data["label"][index],
    "row": batch["row"],
    "weight": batch["weight"],
  }
