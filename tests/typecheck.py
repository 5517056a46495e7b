"""The type checker that the tests put under jaxtyping's import hook."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
