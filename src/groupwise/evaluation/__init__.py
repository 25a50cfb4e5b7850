"""Evaluation: figures with intervals, paired comparisons, and the sentences they support."""

from groupwise.evaluation.curves import CurveSummary, smooth, summarise
from groupwise.evaluation.intervals import Estimate, prompt_mean, seed_mean, wilson
from groupwise.evaluation.paired import (
    ItemDifference,
    Reflection,
    SeedDifference,
    holm,
    mcnemar,
    paired_items,
    paired_seeds,
    reflection_rates,
)
from groupwise.evaluation.passk import (
    best_of_k,
    best_of_n_kl_bound,
    expected_max,
    expected_max_plugin,
    majority_at_k,
    pass_at_k,
    pass_at_k_plugin,
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
    "Estimate",
    "Figure",
    "FigureTable",
    "ItemDifference",
    "Reflection",
    "SeedDifference",
    "best_of_k",
    "best_of_n_kl_bound",
    "compare_curves",
    "expected_max",
    "expected_max_plugin",
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
    "pass_at_k_plugin",
    "prompt_mean",
    "reflection_rates",
    "seed_mean",
    "sentence",
    "smooth",
    "summarise",
    "terminal_table",
    "title_of",
    "wilson",
]
