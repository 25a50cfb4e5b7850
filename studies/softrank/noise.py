"""A judge that errs, for `--import`: part of the study's third part.

groupwise compare --import studies/softrank/noise.py --plan …
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random

from groupwise.rewards.base import REWARDS


@REWARDS.register
def flipped(
    prompt: str, texts: Sequence[str], corrects: Sequence[float], *, share: float
) -> list[float]:
    """What turns the verifier's 0 into 1 and its 1 into 0, for a share of the answers.

    It is added to the verifier's reward, so that accuracy is still measured without error. Which
    answers are misjudged follows from the prompt and the texts of the group, so that a run can be
    repeated; each answer is misjudged with probability `share`, independently of its text.

    Example:
        >>> flipped("1+1", ["2", "3"], [1.0, 0.0], share=1.0)
        [-1.0, 1.0]
    """
    random = Random(json.dumps([prompt, *texts]))
    return [1 - 2 * right if random.random() < share else 0.0 for right in corrects]
