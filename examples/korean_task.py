"""A task in Korean: choose the right form in a sentence, and give the reason.

The items ship with the package. First the rewards score the reference answer and a wrong one,
component by component: always check this before a run. Then a short run follows. The bundled model
knows no Korean, so the run only shows that the parts work together; `groupwise train korean-norms`
uses a real model.

    python examples/korean_task.py [STEPS] [FOLDER]
"""

import sys

from groupwise.config import load
from groupwise.config.connect import make_scorer
from groupwise.config.data import load_train
from groupwise.training.run import train_config
from groupwise.types import Completion, Group


def judged(config, prompt, texts):
    """What each component of the recipe's reward gives to some answers to a prompt."""
    completions = tuple(
        Completion(tokens=[1], mask=[True], logprobs=[0.0], text=text, finish="stop")
        for text in texts
    )
    with make_scorer(config) as scorer:
        return scorer.submit(
            Group(prompt=prompt, prompt_tokens=[1], completions=completions)
        ).result()


def main(steps: int = 2, folder: str = "runs/korean-task"):
    """Judge, then train."""
    config = load(
        "korean-norms",
        [
            f"steps={steps}",
            f"output={folder}",
            "model.path=bundled",
            "sampling.max_tokens=16",
            "prompts_per_step=2",
            "group_size=4",
            "evaluation.prompts=2",
            "guards.silent_rewards=say",
            "data.system=",
            "threads=1",
        ],
    )
    prompt = load_train(config)[0]
    print(prompt)
    score = judged(config, prompt, [prompt.answer, "잘 모르겠습니다."])
    for part, values in score.parts.items():
        print(f"{part}: reference {values[0]:.2f}, no answer {values[1]:.2f}")
    print(f"total: reference {score.total[0]:.2f}, no answer {score.total[1]:.2f}")
    return score, train_config(config)


if __name__ == "__main__":
    main(*(int(a) if a.isdigit() else a for a in sys.argv[1:3]))
