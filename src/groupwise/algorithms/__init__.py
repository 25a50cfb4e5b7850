"""The table of algorithms: brand names and presets, each a row of registered functions.

`ALGORITHMS` holds the rows, `bind` turns one into the functions of a run (`Rules`), `describe` and
`table` say what they are. Functions are named for what they compute; the names that papers and
projects use live here and nowhere else.
"""

from groupwise.algorithms.binding import SLOTS, Algorithm, Rules, bind
from groupwise.algorithms.describe import describe, table
from groupwise.algorithms.table import ALGORITHMS

__all__ = ["ALGORITHMS", "SLOTS", "Algorithm", "Rules", "bind", "describe", "table"]
