"""The sources of the documentation site: complete, in the menu, with links that lead somewhere."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from groupwise.algorithms import ALGORITHMS
from groupwise.algorithms.binding import SLOTS
from groupwise.algorithms.describe import slot_settings
from groupwise.config import packaged, reference
from groupwise.environments import ENVIRONMENTS
from groupwise.pipelines.plan import packaged_pipelines
from groupwise.report.metrics import METRICS
from groupwise.rewards import REWARDS
from groupwise.training.monitor.alerts import ALERT_RULES

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources of the site, written."""
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / "docs" / "pages.py")
    assert spec is not None and spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "docs"))
        spec.loader.exec_module(module)
    folder = tmp_path_factory.mktemp("site") / "source"
    module.write(folder)
    return folder


def test_every_name_has_its_place_in_the_reference(site: Path) -> None:
    pages = {path.stem: path.read_text(encoding="utf-8") for path in site.glob("reference/*.md")}
    for kind, names in {"algorithms": ALGORITHMS, "rewards": REWARDS,
                        "environments": ENVIRONMENTS}.items():  # fmt: skip
        titles = titles_of(site / "reference" / kind)
        assert titles == set(names), kind
        assert linked(pages[kind]) == {path.name for path in (site / "reference" / kind).iterdir()}
    for slot, registry in SLOTS.items():
        own = (site / "reference" / "functions").glob(f"{slot}-*.md")
        assert {title(path) for path in own} == set(registry), slot
    for name in (*packaged(), *packaged_pipelines()):
        assert f"\n### {name} {{ #" in pages["recipes"], name
    assert all(f"| `{key}` |" in pages["metrics"] for key in METRICS)
    for rule in ALERT_RULES:
        said = pages["alerts"].split(f"\n## {rule.threshold}\n")[1].split("Likely causes")[0]
        assert " Fires when " in said and f"settings/alerts.md#{rule.threshold}" in said


def title(page: Path) -> str:
    """The heading of a page."""
    return re.findall(r"^# (.+)$", page.read_text(encoding="utf-8"), flags=re.M)[0]


def titles_of(folder: Path) -> set[str]:
    """The titles of the pages of a folder."""
    return {title(page) for page in folder.iterdir()}


def test_every_page_has_a_description_of_its_own(site: Path) -> None:
    found = {}
    for page in site.rglob("*.md"):
        head = re.match(r"---\n(.*?)---\n", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        found[page] = yaml.safe_load(head[1]).get("description", "") if head else ""
    assert [page for page, said in found.items() if not 14 < len(said) <= 200] == []
    assert [said for said in found.values() if re.search(r"\*\*\w|`|\]\(|\\", said)] == []
    assert "Reinforcement-learning post-training" in found[site / "README.md"]
    assert found[site / "reference" / "settings" / "optimizer.md"] == "AdamW and its learning rate."


def linked(page: str) -> set[str]:
    """The names of the files that a page links to."""
    return {link.rpartition("/")[2] for link in re.findall(r"\]\(([^)#\s]+)", page)}


def test_every_setting_says_what_it_takes_and_which_recipes_set_it(site: Path) -> None:
    found: dict[str, str] = {}
    for page in (site / "reference" / "settings").iterdir():
        section, *settings = page.read_text(encoding="utf-8").split("\n## ")
        title = section.split("\n# ")[1].split("\n")[0]
        prefix = "" if title == "Top level" else f"{title}."
        found |= {f"{prefix}{text.split()[0]}": text for text in settings}
    assert found.keys() == {*reference(), *slot_settings()}
    for path, setting in reference().items():
        assert f"Default: `{setting.default}`" in found[path], path
    assert "[dapo](../recipes.md#dapo) `320`" in found["steps"]
    slot = (site / "reference" / "settings" / "algorithm.weighting.md").read_text(encoding="utf-8")
    assert "can fill the slot `weighting`" in slot
    assert "[dapo](../algorithms/dapo.md) (`0.28`)" in found["algorithm.surrogate.high"]


def test_commands_and_lists_in_comments_of_recipes_are_no_prose(site: Path) -> None:
    page = (site / "reference" / "recipes.md").read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```$|`[^`\n]*`", "", page, flags=re.DOTALL | re.M)
    assert re.findall(r"^.*\bgroupwise (?:train|prefer|sft|reward-model) .*$", prose, re.M) == []
    assert re.findall(r"^1\. .* 2\. .*$", prose, re.M) == []


def test_the_search_ranks_settings_of_every_run_above_others(site: Path) -> None:
    def boost(name: str) -> float:
        page = (site / "reference" / "settings" / f"{name}.md").read_text(encoding="utf-8")
        return float(re.findall(r"\A---\nsearch: \{boost: ([\d.]+)\}\n", page)[0])

    assert boost("optimizer") == boost("top-level") > boost("sft") > 1
    assert boost("optimizer") > boost("critic.optimizer") > 1
    separator = re.findall(r"separator: '(.*?)'", (ROOT / "mkdocs.yml").read_text("utf-8"))[0]
    assert re.split(separator, "optimizer.learning_rate") == ["optimizer", "learning_rate"]


def test_tags_in_docstrings_and_messages_are_not_read_as_html(site: Path) -> None:
    page = (site / "reference" / "rewards" / "exact_answer.md").read_text(encoding="utf-8")
    assert 'such as "&lt;/think>"' in page


def test_every_command_has_a_page_with_its_options(site: Path) -> None:
    folder = site / "reference" / "commands"
    index = (site / "reference" / "commands.md").read_text(encoding="utf-8")
    assert linked(index) == {path.name for path in folder.iterdir()}
    assert {"train.md", "reward-try.md", "reward-list.md", "watch.md"} <= linked(index)
    assert "## `--resume DIR`" in (folder / "train.md").read_text(encoding="utf-8")
    defaults = {"sample.md": "`samples.jsonl`", "watch.md": "`0`", "chat.md": "`0.0`"}
    for name, default in defaults.items():
        assert f"Default: {default}." in (folder / name).read_text(encoding="utf-8"), name
    page = (folder / "plan.md").read_text(encoding="utf-8")
    assert "```sh\ngroupwise plan RECIPE --gpus N [OPTIONS]\n" in page and "## `--kind" in page


def test_no_page_shows_what_python_calls_things(site: Path) -> None:
    pages = {page: page.read_text(encoding="utf-8") for page in site.rglob("reference/**/*.md")}
    assert [page.name for page, text in pages.items() if "inspect._empty" in text] == []
    assert [page.name for page, text in pages.items() if "Default: ``" in text] == []
    judge = (site / "reference" / "rewards" / "judge.md").read_text(encoding="utf-8")
    assert len(re.findall(r"^\* .*being asked about", judge, re.MULTILINE)) == 1
    assert re.search(r"^\* One score per completion.*being asked about", judge, re.MULTILINE)
    slots = "".join(text for page, text in pages.items() if page.name.startswith("algorithm."))
    assert "| `normalise` | true or false | `false` |" in judge
    assert "Literal[" not in slots and "collections.abc" not in slots
    assert (
        "Values: table or null; default `null`." in slots and "Values: integer; required." in slots
    )


def test_every_page_is_in_the_menu_or_below_one_that_is(site: Path) -> None:
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    named = set(re.findall(r": (\S+\.md)$", menu, flags=re.MULTILINE))
    pages = {str(path.relative_to(site)) for path in site.rglob("*.md")}
    assert named == {page for page in pages if not re.match(r"reference/\w+/", page)}


def test_links_between_pages_lead_to_pages(site: Path) -> None:
    dead = [
        f"{page.relative_to(site)}: {link}"
        for page in site.rglob("*.md")
        for link in re.findall(r"\]\((?![a-z]+:)([^)#\s]+)", page.read_text(encoding="utf-8"))
        if not (page.parent / link).exists()
    ]
    assert dead == []
