"""The table of algorithms: brand names and presets, each a row of registered functions.

`ALGORITHMS` holds the rows, `bind` turns a row into a `BoundAlgorithm` whose functions a run calls,
`describe` and `table` explain rows in words. Functions are named for what they compute; the names
that papers and projects use are row names only.
"""

from groupwise.algorithms.binding import SLOTS, Algorithm, BoundAlgorithm, bind
from groupwise.algorithms.describe import describe, table
from groupwise.algorithms.table import ALGORITHMS

__all__ = ["ALGORITHMS", "SLOTS", "Algorithm", "BoundAlgorithm", "bind", "describe", "table"]
