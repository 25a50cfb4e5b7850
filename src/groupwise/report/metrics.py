"""The metrics of `metrics.jsonl`: title in charts and meaning."""

from __future__ import annotations

import re
from typing import NamedTuple

from groupwise.evaluation import title_of
from groupwise.evaluation.details import MOST_CALLS


class Metric(NamedTuple):
    """A metric as reports and the reference name it.

    Attributes:
        title: heading of its chart, with the unit.
        meaning: one sentence.
    """

    title: str
    meaning: str


METRICS: dict[str, Metric] = {
    "accuracy": Metric(
        "Accuracy", "Share of correct completions among those that the verifier could judge."
    ),
    "reward": Metric("Reward", "Mean total reward of the judged completions."),
    "signal_share": Metric(
        "Groups with signal",
        "Share of groups whose completions earned different rewards; with a baseline, only these "
        "give a gradient.",
    ),
    "valid_share": Metric("Judged completions", "Share of completions that could be judged."),
    "positive_share": Metric(
        "Positive advantages", "Share of judged completions with an advantage above 0."
    ),
    "nonzero_share": Metric(
        "Non-zero advantages", "Share of judged completions with an advantage other than 0."
    ),
    "effective_samples": Metric(
        "Effective samples per group",
        "(Σ|A|)² / ΣA²: how many completions of a group carry its gradient.",
    ),
    "grad_norm": Metric("Gradient norm", "Norm of the gradient before clipping."),
    "loss": Metric("Loss", "Loss, summed over the optimizer steps of the training step."),
    "entropy": Metric(
        "Entropy (nats per token)",
        "Mean entropy of the policy; estimated by −log π of the sampled tokens without an "
        "entropy bonus.",
    ),
    "kl": Metric(
        "KL from the reference",
        "k3 estimate of KL(policy‖reference) in nats per token, before the update.",
    ),
    "teacher_kl": Metric(
        "Distance from the teacher",
        "Mean of log π − log π_T over the sampled tokens: an estimate of KL(policy‖teacher) in "
        "nats per token, before the update.",
    ),
    "length": Metric("Completion length (tokens)", "Mean number of tokens that the policy wrote."),
    "truncated_share": Metric(
        "Truncated completions", "Share of completions that reached the token limit."
    ),
    "length_right": Metric(
        "Length of right answers (tokens)", "Mean number of tokens of correct completions."
    ),
    "length_wrong": Metric(
        "Length of wrong answers (tokens)", "Mean number of tokens of incorrect completions."
    ),
    "reflective_share": Metric(
        "Reflective answers", 'Share of completions with words such as "wait" or "double-check".'
    ),
    "accuracy_reflective": Metric(
        "Accuracy of reflective answers",
        'Accuracy of completions with words such as "wait" or "double-check".',
    ),
    "accuracy_plain": Metric(
        "Accuracy of other answers",
        'Accuracy of completions without words such as "wait" or "double-check".',
    ),
    "tokens_per_second": Metric(
        "Tokens per second", "Tokens written by the policy over the seconds of all stages."
    ),
    "seconds": Metric("Seconds per step", "Wall-clock time of the whole step."),
    "learning_rate": Metric("Learning rate", "Learning rate of the last optimizer step."),
    "memory_mb": Metric(
        "Memory (MB)", "Peak memory of the GPU, or of the process where there is none."
    ),
    "reward_std": Metric(
        "Reward deviation", "Standard deviation of the rewards of all judged completions."
    ),
    "length_max": Metric("Longest completion (tokens)", "Tokens of the longest completion."),
    "drawn": Metric(
        "Groups drawn", "Groups sampled to fill the step, including those that a filter dropped."
    ),
    "computed_share": Metric(
        "Computed rows",
        "Share of rows that the update computed; rows without a gradient are skipped.",
    ),
    "tokens": Metric("Tokens", "Tokens that the policy wrote in the step."),
    "policy_kl": Metric(
        "KL of the update", "k3 estimate of KL(policy before‖policy in the update), in nats."
    ),
    "clip_low": Metric(
        "Clipped below", "Share of tokens with A < 0 whose ratio is below the clip."
    ),
    "clip_high": Metric(
        "Clipped above", "Share of tokens with A > 0 whose ratio is above the clip."
    ),
    "sampler_gap": Metric(
        "Sampler gap (nats)",
        "Mean |log π_learner − log π_sampler| of the sampled tokens; 0 where both agree.",
    ),
    "sampler_gap_max": Metric(
        "Largest sampler gap (nats)", "Largest |log π_learner − log π_sampler| of a sampled token."
    ),
    "sampler_kl": Metric(
        "KL(sampler‖learner)", "k3 estimate of KL(sampler‖learner), in nats per token."
    ),
    "sampler_ratio_gap": Metric(
        "Sampler ratio gap", "Mean |r − 1| of the ratio r = π_learner / π_sampler."
    ),
    "sampler_ratio_gap_max": Metric("Largest sampler ratio gap", "Largest |r − 1| of a token."),
    "sampler_ess": Metric(
        "Effective sample size (sampler)",
        "Effective share of the tokens after weighting each by π_learner / π_sampler.",
    ),
    "unfinished": Metric(
        "Unfinished groups",
        "Groups that are still being sampled, with partial rollouts or streaming.",
    ),
    "token_age": Metric(
        "Age of tokens (optimizer steps)",
        "Mean number of optimizer steps between the weights that sampled a token and those that "
        "learn from it.",
    ),
    "token_age_max": Metric(
        "Oldest token (optimizer steps)",
        "Largest number of optimizer steps between the weights that sampled a token and those "
        "that learn from it.",
    ),
    "old_share": Metric(
        "Tokens of earlier weights",
        "Share of the tokens in the update that older weights sampled.",
    ),
    "duplicate_share": Metric(
        "Duplicates",
        "Share of completions that repeat an earlier one of their group; groups that are entirely "
        "correct count 0.",
    ),
    "parts_correlation": Metric(
        "Correlation of rewards", "Lowest correlation of two reward components within groups."
    ),
    "skipped_updates": Metric(
        "Skipped updates", "Number of optimizer steps skipped because the gradient was not finite."
    ),
    "unmoved_share": Metric(
        "Unmoved parameters", "Share of trained tensors that the second step did not change."
    ),
    "calls": Metric("Calls per completion", "Mean number of tool calls of a completion."),
    "injected": Metric(
        "Injected tokens",
        "Mean number of tool tokens per completion; they have no loss.",
    ),
    "answered_share": Metric(
        "Answered calls",
        "Share of tool calls that did not fail and were neither rejected nor malformed.",
    ),
    "seconds_per_call": Metric("Seconds per call", "Mean duration of a tool call."),
    "tool_wait_seconds": Metric(
        "Waiting for tools (seconds)",
        "Mean time that a completion waited for its calls, time without a free worker included.",
    ),
    "explained_variance": Metric(
        "Explained variance",
        "1 − Var(R − V) / Var(R) over all tokens, with the values before the critic's update.",
    ),
    "explained_variance_last": Metric(
        "Explained variance, last token",
        "1 − Var(R − V) / Var(R) over the last token of each completion.",
    ),
    "pooled_r2": Metric(
        "R² of the critic, 20 steps",
        "1 − Σ (R − V)² / Σ (R − mean R)² over the tokens of the last 20 steps.",
    ),
    "pooled_r2_last": Metric(
        "R² of the critic, 20 steps, last token",
        "1 − Σ (R − V)² / Σ (R − mean R)² over the last tokens of the completions of 20 steps.",
    ),
    "returns": Metric("Returns", "Mean return over the tokens of the policy."),
    "value_loss": Metric("Value loss", "Mean loss of the critic over its updates of the step."),
    "value_clip_share": Metric(
        "Clipped values", "Share of tokens whose value moved beyond the clip."
    ),
    "token_reward_right": Metric(
        "Token reward: right answers",
        "Mean probability of correctness that the token reward model assigns to correct "
        "completions, before its update.",
    ),
    "token_reward_wrong": Metric(
        "Token reward: wrong answers",
        "Mean probability of correctness that the token reward model assigns to incorrect "
        "completions, before its update.",
    ),
    "token_weight": Metric(
        "Token weight", "Mean weight ω of the tokens, from the token reward model."
    ),
    "pairs": Metric("Pairs", "Number of pairs of rollouts in the step."),
    "unpaired_share": Metric(
        "Groups without pairs", "Share of groups whose answers formed no pair."
    ),
    "step_reward": Metric("Reward of a step", "Mean reward of the steps of the completions."),
    "steps_written": Metric(
        "Steps per completion", "Mean number of steps of the completions whose steps were judged."
    ),
}
"""Metrics in the order of their charts."""

FAMILIES: tuple[tuple[str, Metric], ...] = (
    (r"seconds\.(\w+)", Metric("Seconds: {0}", "Seconds of the step spent on {0}.")),
    (r"tool_(\w+)", Metric("{0} per completion", "Mean of `{0}`, counted by the environment.")),
    (
        r"kl_at_age\.(\d+)",
        Metric("KL at age {0}", "KL(sampler‖learner) of tokens {0} optimizer steps old, in nats."),
    ),
    (
        r"ess_at_age\.(\d+)",
        Metric(
            "Effective sample size at age {0}",
            "Share of tokens {0} optimizer steps old that is effective after weighting each by "
            "π_learner / π_sampler.",
        ),
    ),
    (
        r"accuracy_after_(\d+)_calls",
        Metric(
            "Accuracy after {0} calls",
            "Share of correct completions among the judged ones with {0} tool calls"
            f" ({MOST_CALLS}: or more).",
        ),
    ),
    (r"reward_(\w+)", Metric("Reward: {0}", "Mean of the component `{0}` before its weight.")),
)
"""Patterns of metrics that are named after a stage, an environment's count or a reward."""


FIGURES: dict[str, str] = {
    "greedy": "Share of prompts whose most likely answer (temperature 0) is correct.",
    "sampled": "Share of correct answers among the sampled ones, averaged over prompts.",
    "pass_at_k": "Probability that at least one of {0} sampled answers is correct.",
    "maj_at_k": "Probability that the most frequent of {0} sampled answers is correct.",
    "best_at_k": "Probability that the answer with the highest reward of {0} samples is correct.",
    "reward": "Mean total reward of the sampled answers.",
    "length": "Mean number of tokens of the sampled answers.",
    "length_right": "Mean number of tokens of the correct answers, over prompts that have one.",
    "length_wrong": "Mean number of tokens of the incorrect answers, over prompts that have one.",
    "truncated": "Share of sampled answers that reached the token limit.",
    "within_budget": "Share of sampled answers that ended within the token budget.",
    "calls": "Mean number of tool calls of a sampled answer.",
    "accuracy_after_k_calls": "Share of correct answers among the sampled ones with {0} tool calls "
    f"({MOST_CALLS}: or more), averaged over prompts.",
    "well_formed": "Share of greedy answers in which the reward finds an answer.",
    "right_if_formed": "Share of correct answers among those in which the reward finds an answer.",
    "greedy_lenient": "Like greedy, but the answer may have any form.",
    "sampled_lenient": "Like sampled, but the answer may have any form.",
    "seed_deviation": "Standard deviation of the sampled accuracy over the sampling seeds.",
    "pair_accuracy": "Share of held-out pairs in which the better answer scores higher.",
    "calibration_error": "Mean gap between predicted probabilities and the share that is right.",
    "loss": "Mean loss of the held-out rows.",
    "perplexity": "exp of the mean loss per token of the held-out rows.",
    "score_length": "Correlation of score and length within prompts.",
    "better_length": "Correlation of length and the order given by the data, within prompts.",
    "score_target": "Correlation of the scores with those given in the data.",
    "squared_error": "Mean squared distance between the scores and those given in the data.",
    "step_accuracy": "Share of steps whose probability is on the correct side of 0.5.",
    "first_error": "Share of answers with an error whose first wrong step is found.",
    "answer_accuracy": "Share of answers that their lowest step probability classifies correctly.",
}
"""What the figures of evaluations mean; {0} is k."""


def figure_meaning(name: str) -> str:
    """One sentence about a figure of an evaluation; empty for one that is not in the list.

    Example:
        >>> figure_meaning("pass_at_8")
        'Probability that at least one of 8 sampled answers is correct.'
    """
    k = re.search(r"(?<=_at_)\d+$|(?<=_after_)\d+(?=_calls$)", name)
    if k is None:
        return FIGURES.get(name, "")
    return FIGURES.get(f"{name[: k.start()]}k{name[k.end() :]}", "").format(k[0])


def metric(key: str) -> Metric | None:
    """Title and meaning of a metric; None for one that is not in the list.

    Example:
        >>> metric("reward_length").meaning
        'Mean of the component `length` before its weight.'
        >>> metric("critic.grad_norm").title
        'Critic: gradient norm'
    """
    if key in METRICS:
        return METRICS[key]
    for pattern, words in FAMILIES:
        if found := re.fullmatch(pattern, key):
            name = title_of(found[1])
            return Metric(words.title.format(name).capitalize(), words.meaning.format(found[1]))
    learner, dot, name = key.partition(".")
    if dot and name in METRICS:
        known = METRICS[name]
        title = f"{learner}: {known.title[0].lower()}{known.title[1:]}".capitalize()
        return Metric(title, f"Of the learner `{learner}`: {known.meaning}")
    return None
