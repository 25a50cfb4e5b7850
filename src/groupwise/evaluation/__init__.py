"""Evaluation: figures with intervals, paired comparisons, and the verdicts they support."""

from groupwise.evaluation.curves import CurveSummary, smooth, summarise, summarise_arm
from groupwise.evaluation.intervals import Estimate, coverage_note, prompt_mean, seed_mean, wilson
from groupwise.evaluation.paired import (
    Equivalence,
    SeedDifference,
    equivalence,
    holm,
    mcnemar,
    paired_items,
    paired_seeds,
    reflection_rates,
)
from groupwise.evaluation.passk import (
    best_of_k,
    majority_at_k,
    pass_at_k,
)
from groupwise.evaluation.tables import (
    FigureTable,
    figure_table,
    is_share,
    terminal_table,
    title_of,
)
from groupwise.evaluation.verdicts import (
    Comparison,
    Contrast,
    Figure,
    compare_curves,
    item_verdict,
    paired_verdicts,
    sentence,
)

__all__ = [
    "Comparison",
    "Contrast",
    "CurveSummary",
    "Equivalence",
    "Estimate",
    "Figure",
    "FigureTable",
    "SeedDifference",
    "best_of_k",
    "compare_curves",
    "coverage_note",
    "equivalence",
    "figure_table",
    "holm",
    "is_share",
    "item_verdict",
    "majority_at_k",
    "mcnemar",
    "paired_items",
    "paired_seeds",
    "paired_verdicts",
    "pass_at_k",
    "prompt_mean",
    "reflection_rates",
    "seed_mean",
    "sentence",
    "smooth",
    "summarise",
    "summarise_arm",
    "terminal_table",
    "title_of",
    "wilson",
]
