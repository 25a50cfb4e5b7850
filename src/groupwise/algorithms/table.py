"""The rows. A value that a paper does not state is named in `differs`."""

from __future__ import annotations

from dataclasses import replace

from groupwise.algorithms.binding import ALGORITHMS, Algorithm
from groupwise.registry import spec

_SOFTRANK_PAPER = "SoftRank-GRPO"
_DDOF = "The paper states neither ddof nor an epsilon: population deviation and none here."
_EQUAL = "Groups of equal rewards give exactly 0; the project divides rounding noise by epsilon."
_STRICT = "Groups with fewer than two judged answers give 0; verl gives a group of one its reward."
_OREAL = Algorithm(
    name="oreal",
    paper="OREAL (2502.06781), without its token reward model",
    advantage=spec("cloning"),
    surrogate=spec("reinforce"),
    divergence=spec("k3"),
    divergence_coefficient=0.01,
    weighting=spec("batch_token_mean"),
    filter=spec("spread"),
    differs=(
        "η, the weight of wrong answers, and the KL coefficient are those of the code: 0.5 and "
        "0.01.",
        "The shaping of wrong answers is left open; the z-score is the paper's example.",
        "Groups that are all right or all wrong are replaced by other prompts, "
        "and all other answers are used; with a token reward model, the authors keep one random "
        "right and one random wrong answer of each prompt.",
        "The KL is to the model before training, as in the code.",
        "With several minibatches, right and wrong tokens are counted over the whole batch.",
    ),
)


def _variant(name: str, of: str, *differs: str) -> Algorithm:
    """A row that shares everything with `softrank` but the advantage."""
    return Algorithm(
        name=name,
        paper=of,
        advantage=spec(name),
        weighting=spec("group_token_mean"),
        differs=(
            "Clip and normaliser are those of softrank, so that only the advantage differs.",
            *differs,
        ),
    )


ROWS = (
    Algorithm(
        name="softrank",
        paper=_SOFTRANK_PAPER,
        advantage=spec("softrank", tau=0.5),
        divergence=spec("k3"),
        weighting=spec("group_token_mean"),
        differs=(
            "Uses the per-sample advantage w_i·r_i of the equation; in the text "
            "and Algorithm 1, the weighted sum is the advantage of all samples: softrank@kaist.",
            _DDOF + " A group of equal rewards r gets r/K.",
            "Clip range and KL coefficient are not stated: 0.2, and 0 (no reference model); "
            "the authors' code inherits 0.04.",
            "Advantages are about K times smaller than those of grpo, so KL, entropy bonus and "
            "gradient clipping weigh more at equal settings.",
            "With 0/1 rewards, only correct answers have a nonzero advantage; in a group of right "
            "answers, all do.",
        ),
    ),
    Algorithm(
        name="softrank@kaist",
        paper=f"{_SOFTRANK_PAPER}, the authors' code (KAIST-AILab/SR-GRPO)",
        advantage=spec("softrank_group", tau=0.5, ddof=1, eps=1e-5),
        surrogate=spec("importance"),
        divergence=spec("k3"),
        divergence_coefficient=0.04,
        weighting=spec("sequence_mean"),
        differs=(
            "Against the paper's equation: one advantage for the whole group, sample deviation, no "
            "clip (the ratio is 1), mean over the tokens of each answer.",
            "Learns almost nothing, because good and bad answers of a group have the same "
            "advantage.",
            "The code groups by num_items_in_batch, which can cut groups wrongly; not reproduced.",
        ),
    ),
    _variant("softrank_centered", "softrank with the mean contribution of the group as baseline"),
    _variant("softrank_loo", "softrank with the soft maximum of the other answers as baseline"),
    _variant(
        "softrank_zero_sum",
        "softrank weights against uniform weights",
        "Vanishes as tau → 0; see softrank_interpolated.",
    ),
    _variant("softrank_interpolated", "from maxrl (tau → 0) to grpo (tau → ∞)"),
    _variant(
        "softrank_two_sided",
        "softmax weights of the best against those of the worst; experimental",
        "Not published: a candidate of the study in docs/studies, for any range of rewards.",
    ),
    _variant("entropic", "softmax of raw rewards against uniform weights; entropic risk"),
    _variant("lse_loo", "unbiased gradient of the log-mean-exp of a group's rewards"),
    _variant("softbok_loo", "unbiased gradient of the soft best-of-K of a group"),
    Algorithm(
        name="grpo",
        paper="GRPO, DeepSeekMath (2402.03300)",
        advantage=spec("zscore"),
        divergence=spec("k3"),
        divergence_coefficient=0.04,
        weighting=spec("sequence_mean"),
        differs=(
            _DDOF,
            "Outcome supervision; rewards per reasoning step are grpo_process.",
            "The report on R1 prints a ratio of whole sequences; public code uses token ratios.",
        ),
    ),
    Algorithm(
        name="grpo@trl",
        paper="GRPOTrainer of TRL 1.16 with its defaults",
        advantage=spec("zscore", ddof=1, eps=1e-4),
        divergence=spec("k3_weighted"),
        weighting=spec("batch_token_mean"),
        entropy_over="tokens",
        differs=(
            _EQUAL,
            "beta = 0: no reference model is loaded; with a coefficient, the KL is weighted by "
            "the ratio as in TRL's use_bias_correction_kl.",
            "With vLLM, TRL also multiplies by sequence_icepop(low=0, high=3); set "
            "algorithm.correction for that.",
        ),
    ),
    Algorithm(
        name="grpo@verl",
        paper="GRPO of verl with its defaults",
        advantage=spec("zscore", ddof=1, eps=1e-6, raw_singletons=True),
        surrogate=spec("dual_clip", bound=3.0),
        divergence=spec("k3"),
        weighting=spec("batch_token_mean"),
        differs=(
            _EQUAL,
            "KL is off; where it is on, verl clamps k3 to ±10; its default coefficient is 0.001.",
        ),
    ),
    Algorithm(
        name="grpo_process",
        paper="GRPO with process supervision, DeepSeekMath (2402.03300), section 4.1.3",
        advantage=spec("step_zscore"),
        divergence=spec("k3"),
        divergence_coefficient=0.04,
        weighting=spec("sequence_mean"),
        differs=(
            "Neither ddof nor an epsilon is stated: population deviation and none here.",
            "Rewards of steps come from the section [process]; [[rewards]] decide "
            "which completions are judged, and are only measured.",
            "The paper's reward model was trained on labels from rollouts (Math-Shepherd); "
            "here on labels in the data.",
        ),
    ),
    Algorithm(
        name="dr_grpo",
        paper="Dr. GRPO, Understanding R1-Zero-Like Training (2503.20783)",
        advantage=spec("centered"),
        weighting=spec("constant_length", length=3000),
        differs=(
            "length is the generation budget of the authors' runs; it sets the scale of the loss "
            "and nothing else, so set it to your own max_tokens where gradient clipping matters.",
            "TRL needs scale_rewards = False as well; verl divides by the padded width unless "
            "configured otherwise.",
        ),
    ),
    Algorithm(
        name="dapo",
        paper="DAPO (2503.14476)",
        advantage=spec("zscore"),
        surrogate=spec("ppo_clip", low=0.2, high=0.28),
        weighting=spec("batch_token_mean"),
        filter=spec("spread"),
        differs=(
            _DDOF,
            "The equation normalises per prompt; the authors' code, and this row, per batch.",
            "The authors' script also has a dual clip with bound 10: surrogate dual_clip.",
            "The overlong penalty is a reward, and overlong filtering is the filter not_truncated.",
        ),
    ),
    Algorithm(
        name="rloo",
        paper="RLOO, Back to Basics (2402.14740)",
        advantage=spec("leave_one_out"),
        surrogate=spec("reinforce"),
        divergence=spec("k1"),
        divergence_in="reward",
        weighting=spec("sequence_sum"),
        differs=(
            "The KL penalty of the reward is off, as rewards here are verified, not learned; TRL "
            "uses 0.05: set algorithm.divergence.coefficient.",
            "No ratio, as in the paper; TRL clips the ratio of the whole sequence.",
            _STRICT,
        ),
    ),
    Algorithm(
        name="reinforce",
        paper="REINFORCE (Williams 1992), without a baseline",
        advantage=spec("raw"),
        surrogate=spec("reinforce"),
        weighting=spec("sequence_sum"),
        differs=("A control for experiments: every positive reward is imitated.",),
    ),
    Algorithm(
        name="reinforce++",
        paper="REINFORCE++ (2501.03262)",
        advantage=spec("discounted_whitened"),
        divergence=spec("k1"),
        divergence_coefficient=0.01,
        divergence_in="reward",
        weighting=spec("batch_token_mean"),
        differs=(
            "The KL coefficient is not fixed by the paper: 0.01 here.",
            "verl resets the return at tokens that the policy did not write; here they are "
            "skipped.",
        ),
    ),
    Algorithm(
        name="reinforce++-baseline",
        paper="REINFORCE++ with a group baseline (2501.03262)",
        advantage=spec("centered_whitened"),
        divergence=spec("k2"),
        divergence_coefficient=0.01,
        weighting=spec("batch_token_mean"),
        differs=("The KL coefficient is not fixed by the paper: 0.01 here.", _STRICT),
    ),
    Algorithm(
        name="maxrl",
        paper="MaxRL (2602.02710)",
        advantage=spec("maxrl"),
        differs=("Clip and normaliser are PPO's and the batch's tokens, as in verl's defaults.",),
    ),
    Algorithm(
        name="gspo",
        paper="GSPO (2507.18071)",
        advantage=spec("zscore"),
        ratio=spec("sequence"),
        surrogate=spec("ppo_clip", low=3e-4, high=4e-4),
        weighting=spec("sequence_mean"),
        differs=(_DDOF,),
    ),
    Algorithm(
        name="cispo",
        paper="CISPO, MiniMax-M1 (2506.13585)",
        advantage=spec("zscore"),
        surrogate=spec("cispo", floor=0.0, cap=5.0),
        weighting=spec("batch_token_mean"),
        differs=(
            _DDOF,
            "The paper tunes the cap without stating it: 5 as in ScaleRL. verl clips to 1 ± 0.2; "
            "TRL's default caps at 0.2, which scales every gradient.",
        ),
    ),
    Algorithm(
        name="gmpo",
        paper="GMPO (2507.20673)",
        advantage=spec("zscore"),
        surrogate=spec("gmpo", low=0.4, high=0.4),
        weighting=spec("sequence_mean"),
        differs=(_DDOF, "verl clips log-ratios at its clip_ratio, 0.2 by default."),
    ),
    Algorithm(
        name="sapo",
        paper="SAPO (2511.20347)",
        advantage=spec("zscore"),
        surrogate=spec("sapo", positive=1.0, negative=1.05),
        weighting=spec("sequence_mean"),
        differs=(_DDOF,),
    ),
    Algorithm(
        name="kimi",
        paper="Kimi k1.5, online mirror descent (2501.12599)",
        advantage=spec("centered"),
        surrogate=spec("mirror_descent", tau=0.5),
        weighting=spec("sequence_sum"),
        differs=(
            "tau is not published: 0.5 here.",
            "The mean of the group stands for tau·log Z, as in the system; soft_centered is exact.",
            "The optimizer is reset with every batch only where optimizer.reset_every = 1.",
        ),
    ),
    Algorithm(
        name="lite_ppo",
        paper="Lite PPO, Tricks or Traps (2508.08221)",
        advantage=spec("batch_zscore"),
        weighting=spec("batch_token_mean"),
        differs=(_DDOF,),
    ),
    Algorithm(
        name="opo",
        paper="OPO (2505.23585)",
        advantage=spec("length_weighted"),
        surrogate=spec("reinforce"),
        weighting=spec("sequence_mean"),
        differs=("Strictly on-policy, as in the paper: no ratio.", _STRICT),
    ),
    Algorithm(
        name="gpg",
        paper="GPG (2504.02546)",
        advantage=spec("signal_scaled"),
        surrogate=spec("reinforce"),
        weighting=spec("batch_token_mean"),
        differs=("verl scales by the share of non-zero rewards: counting = 'rewards'.", _STRICT),
    ),
    Algorithm(
        name="gdpo",
        paper="GDPO (2601.05242)",
        advantage=spec("parts_zscore"),
        weighting=spec("batch_token_mean"),
        differs=(
            "Needs a reward with named parts; their weights are algorithm.advantage.weights.",
            "TRL whitens over answers with 1e-4; here, as in verl, over tokens.",
        ),
    ),
    Algorithm(
        name="pkpo",
        paper="PKPO (2505.15201)",
        advantage=spec("pass_at_k_gradient", k=4),
        surrogate=spec("reinforce"),
        weighting=spec("sequence_sum"),
        differs=(
            "The group must be larger than k.",
            "Advantages carry the factor K that makes the mean over answers unbiased.",
        ),
    ),
    Algorithm(
        name="pass_at_k_training",
        paper="Pass@k Training (2508.10751)",
        advantage=spec("pass_at_k_training", k=4),
        weighting=spec("batch_token_mean"),
        differs=("No epsilon is added to the deviation.",),
    ),
    Algorithm(
        name="dppo",
        paper="DPPO (2602.04879), total variation",
        advantage=spec("zscore"),
        surrogate=spec("dppo", low=0.2, high=0.2),
        weighting=spec("batch_token_mean"),
        differs=(_DDOF, "The paper also has a form with a binary KL bound."),
    ),
    Algorithm(
        name="ppo",
        paper="PPO (1707.06347) as InstructGPT uses it (2203.02155)",
        advantage=spec("gae", gamma=1.0, lam=0.95, whitened=True),
        surrogate=spec("ppo_clip", low=0.2, high=0.2),
        divergence=spec("k1"),
        divergence_coefficient=0.02,
        divergence_in="reward",
        weighting=spec("batch_token_mean"),
        differs=(
            "The critic is set in the section [critic]; its returns have their own λ, 1 "
            "by default; InstructGPT uses that of the policy.",
            "No pretraining gradients are mixed in (PPO-ptx), and β does not adapt to a target.",
            "InstructGPT starts the critic from the reward model: critic.model. Without it the "
            "critic is a copy of the policy whose values are 0.",
            "The values of InstructGPT are clipped: critic.loss = { name = 'clipped' }.",
        ),
    ),
    Algorithm(
        name="orz",
        paper="Open-Reasoner-Zero (2503.24290): PPO with γ = λ = 1",
        advantage=spec("gae", gamma=1.0, lam=1.0, whitened=True),
        surrogate=spec("ppo_clip", low=0.2, high=0.2),
        weighting=spec("batch_token_mean"),
        differs=(
            "In the paper, the critic takes 12 optimizer steps for each of "
            "the policy: critic.minibatches = 12.",
            "Its code includes padding in the mean of the whitening and rounds the result "
            "to bfloat16; here mean and deviation are over the tokens that the policy wrote.",
            "Its critic starts with a random head; here it starts with values of 0.",
        ),
    ),
    Algorithm(
        name="vapo",
        paper="VAPO (2504.05118)",
        advantage=spec("gae", gamma=1.0, length_alpha=0.05, whitened=True),
        surrogate=spec("ppo_clip", low=0.2, high=0.28),
        weighting=spec("batch_token_mean"),
        differs=(
            "The loss on positive answers (0.1 times their negative log-likelihood) is not "
            "included.",
            "λ = 1 − 1 / (0.05 · l) is negative for answers of fewer than 20 tokens; here it is "
            "0 for them.",
            "Whitening is not stated; it is on here, as in the framework of the authors.",
            "The critic's pretraining is critic.pretraining; its λ is 1, as in the paper.",
        ),
    ),
    Algorithm(
        name="opd",
        paper="on-policy distillation (2306.13649; Lu 2025)",
        advantage=spec("distilled"),
        surrogate=spec("reinforce"),
        weighting=spec("batch_token_mean"),
        differs=(
            "The divergence is estimated from the sampled token; the paper, TRL and verl "
            "sum over the vocabulary or its top-k: distillation.top_k and distillation.beta.",
            "Needs a section [distillation] with the teacher.",
        ),
    ),
    _OREAL,
    replace(
        _OREAL,
        name="oreal@internlm",
        paper="OREAL as the authors' code trains it (InternLM/OREAL), without token reward model",
        advantage=spec("cloning", shaping="leave_one_out", weigh_right=True),
        filter=spec("all"),
        differs=(
            "Against the paper: right answers are weighted by their advantage (pos_mult_adv).",
            "In the code, an answer that cannot be judged counts as wrong; here it is excluded.",
            "The code samples with top_p = 0.9 and scores without it; here the probabilities "
            "are those of the truncated distribution.",
            "The code draws prompts up to 6 times as often, depending on their pass rate "
            "in its data: data.order.",
        ),
    ),
    replace(
        _OREAL,
        name="oreal_token",
        paper="OREAL (2502.06781), with its token reward model",
        advantage=spec("token_cloning"),
        differs=(
            *_OREAL.differs,
            "As in the code, the token reward model has a learning rate "
            "of 2e-6 and 10 steps before the policy.",
            "The head has a bias and starts with scores of 0, so every ω starts at 0; "
            "in the code, it has no bias and starts at random.",
            "The code also weights right answers by their advantage: algorithm.advantage = "
            "{ shaping = 'leave_one_out', weigh_right = true }.",
            "The code can also apply ω only to the most probable tokens "
            "(topk_rescale), which is not supported.",
        ),
    ),
    Algorithm(
        name="log_odds",
        paper="gradient of the log-odds of success; experimental",
        advantage=spec("log_odds"),
        differs=("For 0/1 rewards.",),
    ),
)

for _row in ROWS:
    ALGORITHMS.register(_row)
