"""Prompts as token ids, and text that must survive the tokenizer."""

from __future__ import annotations

import re
import resource
import signal
import threading
import time
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from groupwise.errors import ModelError, UsageError
from groupwise.models import foreign_code
from groupwise.prompts.generators.small_tokenizer import TAGS, small_tokenizer
from groupwise.prompts.generators.word_problems import demonstrations, word_problems
from groupwise.prompts.templates import (
    check_round_trip,
    fix_variables,
    pad_token,
    render,
    render_all,
)
from groupwise.types import Prompt

SMALL = small_tokenizer()


def words(*vocabulary: str, **settings) -> PreTrainedTokenizerFast:
    """A tokenizer of whole words that has no chat template."""
    ids = {word: number for number, word in enumerate(["<unk>", "</s>", *vocabulary])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", **settings)


def user(text: str, **more) -> Prompt:
    return Prompt(id="p", messages=({"role": "user", "content": text},), **more)


@given(st.text(max_size=60))
def test_any_text_survives_the_small_tokenizer(text: str) -> None:
    ids = SMALL(text).input_ids
    assert SMALL.decode(ids) == unicodedata.normalize("NFC", text)


@pytest.mark.parametrize(
    "text",
    ["  two  spaces ", "\r\n\t", "한국어 ㅎㅏㄴ", "é ﬁ ①", "a;b; c ;d", "\x00\ufeff", "😀"],
)
def test_awkward_text_survives_with_special_tokens_skipped(text: str) -> None:
    assert SMALL.decode(SMALL(text).input_ids, skip_special_tokens=True) == text


def test_digits_are_single_and_tags_are_ordinary_tokens() -> None:
    assert SMALL.tokenize("120*34") == ["1", "2", "0", "*", "3", "4"]
    assert [SMALL.tokenize(tag) for tag in TAGS] == [[tag] for tag in TAGS]
    assert not set(TAGS) & set(SMALL.all_special_tokens)
    assert check_round_trip(SMALL, TAGS) == []
    assert len(SMALL) <= 512


def test_a_saved_model_folder_gives_the_same_tokenizer_back(tmp_path: Path) -> None:
    # `AutoTokenizer` looks at the model's type before it looks at the tokenizer's files.
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    SMALL.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for example in demonstrations(size=20):
        assert render(example.prompt, loaded) == render(example.prompt, SMALL)
        assert loaded(example.completion).input_ids == SMALL(example.completion).input_ids
    assert check_round_trip(loaded, TAGS) == []
    assert (loaded.pad_token, loaded.eos_token) == ("<|pad|>", "<|end|>")


def test_every_word_of_the_word_problems_is_one_token() -> None:
    for split in ("train", "held_out_templates"):
        for prompt in word_problems(100, split=split):
            question = prompt.messages[0]["content"]
            pieces = [token.removeprefix("Ġ") for token in SMALL.tokenize(question)]
            assert [p for p in pieces if p] == re.findall(r"[A-Za-z]+|[^A-Za-z\s]", question)


def test_prompts_and_demonstrations_are_short() -> None:
    examples = demonstrations(size=300)
    prompts = [len(render(example.prompt, SMALL)) for example in examples]
    completions = [len(SMALL(example.completion).input_ids) for example in examples]
    assert max(prompts) <= 50 and max(completions) <= 36


def test_the_chat_template_ends_where_the_assistant_begins() -> None:
    tokens = SMALL.convert_ids_to_tokens(render(user("How many?"), SMALL))
    assert tokens[0] == "<|user|>" and tokens[-2:] == ["<|end|>", "<|assistant|>"]


def test_a_begun_answer_is_gone_on_with() -> None:
    turns = (*user("How many?").messages, {"role": "assistant", "content": "<reasoning>"})
    tokens = render(Prompt(id="p", messages=turns), SMALL)
    assert SMALL.convert_ids_to_tokens(tokens)[-2:] == ["<|assistant|>", "<reasoning>"]


# A template with two modes, as models that think have it: one of them begins the answer.
MODES = (
    "{% for m in messages %}{{ m['content'] }} {% endfor %}{% if add_generation_prompt %}go"
    "{% if enable_thinking is defined and enable_thinking is false %} thought over{% endif %}"
    "{% endif %}"
)


def test_the_mode_of_a_template_is_fixed_in_the_model_that_is_saved(tmp_path: Path) -> None:
    tokenizer = words("hi", "go", "thought", "over", eos_token="</s>")
    tokenizer.chat_template = MODES

    def seen(by: PreTrainedTokenizerBase) -> str:
        return " ".join(by.convert_ids_to_tokens(render(user("hi"), by)))

    assert seen(tokenizer) == "hi go"
    fix_variables(tokenizer, {"enable_thinking": False})
    assert seen(tokenizer) == "hi go thought over"
    tokenizer.save_pretrained(tmp_path)
    loaded = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert seen(loaded) == "hi go thought over"
    # Said again of the saved model, the later value counts.
    fix_variables(loaded, {"enable_thinking": True})
    assert seen(loaded) == "hi go"


def test_a_variable_that_the_template_does_not_read_is_refused() -> None:
    tokenizer = words("hi", eos_token="</s>")
    with pytest.raises(UsageError, match="the tokenizer has no chat template"):
        fix_variables(tokenizer, {"enable_thinking": False})
    tokenizer.chat_template = MODES
    fix_variables(tokenizer, {"enable_thinking": False})
    with pytest.raises(UsageError, match=r"enable_thinkin = True.*did you mean enable_thinking\?"):
        fix_variables(tokenizer, {"enable_thinkin": True})


def test_plain_text_is_taken_as_it_is() -> None:
    assert render(Prompt(id="p", text="3+4="), SMALL) == SMALL("3+4=").input_ids


def test_without_template_one_question_becomes_plain_text() -> None:
    tokenizer = words("How", "many", "Be", "brief", eos_token="</s>")
    system = {"role": "system", "content": "Be brief"}
    prompt = Prompt(id="p", messages=(system, *user("How many").messages))
    assert tokenizer.convert_ids_to_tokens(render(prompt, tokenizer)) == "Be brief How many".split()
    longer = Prompt(id="p", messages=(*user("a").messages, {"role": "assistant", "content": "b"}))
    with pytest.raises(ModelError, match=r"conversation \(user, assistant\) .* no chat template"):
        render(longer, tokenizer)


def test_a_template_that_refuses_names_the_prompt() -> None:
    tokenizer = words("a", eos_token="</s>")
    tokenizer.chat_template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(ModelError, match="prompt p: .*System role not supported"):
        render(user("a"), tokenizer)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(UsageError, match="prompt p: is empty"):
        render(Prompt(id="p", text=""), SMALL)


def test_prompts_that_are_too_long_are_refused_or_counted() -> None:
    prompts = [Prompt(id=str(n), text="7" * n) for n in (3, 9, 5)]
    rendered = render_all(prompts, SMALL, limit=5, too_long="drop")
    assert [p.id for p in rendered.prompts] == ["3", "5"] and rendered.dropped == 1
    assert [len(ids) for ids in rendered.tokens] == [3, 5]
    with pytest.raises(UsageError, match="prompt 9: has 9 tokens and at most 5"):
        render_all(prompts, SMALL, limit=5)
    with pytest.raises(UsageError, match="all 3 have more than 2 tokens"):
        render_all(prompts, SMALL, limit=2, too_long="drop")


def test_padding_falls_back_to_the_end_token() -> None:
    assert pad_token(SMALL) == SMALL.pad_token_id
    assert pad_token(words(eos_token="</s>")) == 1
    assert pad_token(words()) == 0


def test_tags_that_decoding_drops_are_found() -> None:
    tokenizer = small_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>"]})
    problems = check_round_trip(tokenizer, ["<think>7</think>", "<answer>7</answer>"])
    assert len(problems) == 1 and "drops <think>" in problems[0] and "special=False" in problems[0]


def test_text_that_a_tokenizer_cannot_hold_is_found() -> None:
    problems = check_round_trip(words("seven"), ["seven", "eight"])
    assert len(problems) == 1 and "comes back from the tokenizer as '<unk>'" in problems[0]


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 10**10 }}",
        "{{ 'a'.ljust(10**10) }}",
        "{% set n = namespace(x='a' * 99999) %}{% for _ in range(40) %}{% set n.x = n.x ~ n.x %}"
        "{% endfor %}{{ n.x }}",
        "{{ range(99999) | map('string') | map('center', 99999) | list }}",
        "{% for _ in range(999) %}{{ 'a' * 99999 }}{% endfor %}",
        "{% for _ in range(99) %}{{ 'a' * 99999 }}{% endfor %}",
    ],
)
def test_a_chat_template_cannot_take_all_memory(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign_code, "COMPUTING", ())  # Other tests leave threads behind.
    tokenizer = words("?")
    tokenizer.chat_template = template
    before = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(ModelError, match=r"needs more than 1024 MiB|writes \d+ characters"):
        render(user("?"), tokenizer)
    assert resource.getrlimit(resource.RLIMIT_AS) == before


@pytest.mark.parametrize(("name", "limited"), [("sampling", False), ("output", True)])
def test_threads_that_sample_are_not_limited(
    name: str, limited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The teacher's prompts are rendered while the next batch is sampled: a limit of the process
    would end the run where a cache of keys and values is made."""
    monkeypatch.setattr(foreign_code, "COMPUTING", ("sampling",))
    before, over = resource.getrlimit(resource.RLIMIT_AS), threading.Event()
    thread = threading.Thread(target=over.wait, name=name, daemon=True)
    thread.start()
    with foreign_code.memory_limit(1 << 30):
        assert (resource.getrlimit(resource.RLIMIT_AS) != before) is limited
    over.set()
    thread.join()


@pytest.mark.parametrize("left", [0.0, 60.0])
def test_a_chat_template_that_does_not_end_is_stopped(
    left: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five nested loops of a hundred thousand; another timer of the program is left as it was."""
    monkeypatch.setattr("groupwise.prompts.templates.RENDER_SECONDS", 0.2)
    tokenizer = words("?")
    loop = "{% for _ in range(99999) %}"
    tokenizer.chat_template = loop * 5 + "{% endfor %}" * 5
    before = signal.signal(signal.SIGALRM, signal.SIG_IGN)
    signal.setitimer(signal.ITIMER_REAL, left)
    try:
        with pytest.raises(ModelError, match="the chat template rejects .* more than 0.2 s"):
            render(user("?"), tokenizer)
        assert signal.getsignal(signal.SIGALRM) is signal.SIG_IGN
        assert signal.getitimer(signal.ITIMER_REAL)[0] == pytest.approx(left, abs=5)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_chat_template_is_stopped_in_any_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that are read lazily are rendered by the threads that sample."""
    monkeypatch.setattr("groupwise.prompts.templates.RENDER_SECONDS", 0.2)
    tokenizer, quick = words("?"), words("?")
    loop = "{% for _ in range(99999) %}"
    tokenizer.chat_template = loop * 5 + "{% endfor %}" * 5
    quick.chat_template = "{{ messages[0].content }}"

    def rendered() -> list[int]:
        with pytest.raises(ModelError, match="the chat template rejects .* more than 0.2 s"):
            render(user("?"), tokenizer)
        found = render(user("?"), quick)
        time.sleep(0.4)  # What was to stop it would come now.
        return found

    with ThreadPoolExecutor(1) as pool:
        pool.submit(rendered).result(timeout=60)
