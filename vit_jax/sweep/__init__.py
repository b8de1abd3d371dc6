"""Sweeps: a table of trials that ends in a table of conclusions.

`space` makes the trials, `plan` puts those that share a program together, `launch` runs
what is missing.
"""
