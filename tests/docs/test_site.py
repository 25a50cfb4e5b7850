"""The sources of the documentation site: complete, in the menu, with links that lead somewhere."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from groupwise.algorithms import ALGORITHMS
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
    spec.loader.exec_module(module)
    folder = tmp_path_factory.mktemp("site") / "source"
    module.write(folder)
    return folder


def test_every_name_has_its_place_in_the_reference(site: Path) -> None:
    pages = {path.stem: path.read_text(encoding="utf-8") for path in site.glob("reference/*.md")}
    for page, names in {"algorithms": ALGORITHMS, "rewards": REWARDS,
                        "environments": ENVIRONMENTS}.items():  # fmt: skip
        headings = set(re.findall(r"^## (\S+)", pages[page], flags=re.MULTILINE))
        assert headings == set(names), page
    rows = re.findall(r"^\| `(\w+)` \|", pages["settings"], flags=re.MULTILINE)
    assert len(rows) == len(reference())
    for name in (*packaged(), *packaged_pipelines()):
        assert f"\n### {name}\n" in pages["recipes"], name
    assert all(f"| `{key}` |" in pages["metrics"] for key in METRICS)
    assert all(f"\n## {rule.threshold}\n" in pages["alerts"] for rule in ALERT_RULES)
    assert "## groupwise reward try" in pages["commands"] and "`--resume`" in pages["commands"]


def test_every_page_is_in_the_menu_and_every_entry_is_a_page(site: Path) -> None:
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    named = set(re.findall(r": (\S+\.md)$", menu, flags=re.MULTILINE))
    assert yaml.safe_load(menu)["strict"] is True
    assert named == {str(path.relative_to(site)) for path in site.rglob("*.md")}


def test_links_between_pages_lead_to_pages(site: Path) -> None:
    dead = [
        f"{page.relative_to(site)}: {link}"
        for page in site.rglob("*.md")
        for link in re.findall(r"\]\((?![a-z]+:)([^)#\s]+)", page.read_text(encoding="utf-8"))
        if not (page.parent / link).exists()
    ]
    assert dead == []
