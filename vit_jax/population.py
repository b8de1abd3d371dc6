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

  def call(states, mapped, shared):
    members = len(jax.tree.leaves(mapped)[0])
    if at_once >= members > 1:
      return jax.vmap(fn, (0, 0, None))(states, mapped, shared)
    group = fn if at_once == 1 else jax.vmap(fn, (0, 0, None))
    size = max(1, min(at_once, members))

    def take(tree, i):
      def slice_(leaf):
        part = jax.lax.dynamic_slice_in_dim(leaf, i * size, size)
        return part[0] if at_once == 1 else part

      return jax.tree.map(slice_, tree)

    def put(tree, part, i):
      def write(leaf, value):
        value = value[None] if at_once == 1 else value
        return jax.lax.dynamic_update_slice_in_dim(leaf, value, i * size, 0)

      return jax.tree.map(write, tree, part)

    def body(i, carry):
      states, outs = carry
      state, out = group(take(states, i), take(mapped, i), shared)
      return put(states, state, i), put(outs, out, i)

    _, out = jax.eval_shape(group, take(states, 0), take(mapped, 0), shared)
    repeats = members if at_once == 1 else members // size
    lead = (members,) if at_once == 1 else ()
    outs = jax.tree.map(
      lambda leaf: jnp.zeros(
        lead + leaf.shape if lead else (members, *leaf.shape[1:]), leaf.dtype
      ),
      out,
    )
    return jax.lax.fori_loop(0, repeats, body, (states, outs))

  return call


def train_many(train_step, at_once: int, reduce):
  """Returns `call(states, batches, hypers, data, count) -> (states, metrics)`.

  `batches` has axes [S, K, B]; the first `count` of K steps are made (a traced number,
  so that one program serves every length of call); metrics have axes [S, K].
  """

  # Traced once, though the loops below ask for its shapes as well.
  @functools.partial(jax.jit, inline=True)
  def one_step(state, batch, hyper):
    return train_step(state, batch, hyper, reduce)

  def member(state, mapped, shared):
    batches, hyper, own = mapped
    data = {**shared["data"], **own}
    steps = len(batches["row"])

    def step(k, state):
      batch = fetch(data, jax.tree.map(lambda leaf: leaf[k], batches))
      return one_step(state, batch, hyper)

    _, metrics = jax.eval_shape(lambda state: step(0, state), state)
    history = jax.tree.map(lambda leaf: jnp.zeros((steps,), leaf.dtype), metrics)

    def body(k, carry):
      state, history = carry
      state, metrics = step(k, state)
      history = jax.tree.map(lambda h, m: h.at[k].set(m), history, metrics)
      return state, history

    return jax.lax.fori_loop(0, shared["count"], body, (state, history))

  mapped_call = over_members(member, at_once)

  def call(states, batches, hypers, own, data, count):
    shared = {"data": data, "count": count}
    return mapped_call(states, (batches, hypers, own), shared)

  return call


def evaluate_many(eval_step, at_once: int):
  """Returns `call(params, hypers, own, batch) -> values`, [S, B] each; the images of
  `own` are each member's, those of `batch` are for all."""

  def member(state, mapped, shared):
    params, hyper, own = mapped
    return state, eval_step(params, {**shared, **own}, hyper)

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
