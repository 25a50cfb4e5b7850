"""The checker that `--jaxtyping-packages` puts around functions: shapes and types as annotated.

An int is accepted where a float is asked for, as in Python's own rules for annotations.
"""

from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
