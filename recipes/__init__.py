"""Hydra recipes that train small diffusion models with `lightning_mixprec`.

They run from a checkout (`python -m recipes.train`) and import the package, never the reverse. The YAML under `conf/`
names constructors and their arguments; everything it names is an ordinary class that also works without Hydra.
"""
