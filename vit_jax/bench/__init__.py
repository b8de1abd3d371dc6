"""Side by side: our code, what people would take instead, and the limit of the machine.

One module a subject, each with `run(...) -> report.Result`: `model_steps` (training and
evaluation steps), `operators` (attention), `pipeline` (data), `startup`, `overhead`,
`populations` and `recipes` (with `recipe_torch`). `race` takes the times, `peers` builds
the others' models, `limits` measures the machine, `report` writes. Peers are extras: what
is not installed is left out with a word.
"""
