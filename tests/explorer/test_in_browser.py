"""Saved pages in Chromium: they open, all their parts can be reached, and names cannot inject
markup."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from selenium.webdriver import Chrome, Keys
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait
from torch import Tensor, nn

import dtensor as dt
from dtensor.explorer import save_pages
from tests.explorer.browser import PATIENCE_S, browser, need_browser
from tests.explorer.pages import gpt_plan, mlp_plan
from tests.models import square_loss


@pytest.fixture(scope="module")
def driver() -> Iterator[Chrome]:
    need_browser()
    with browser() as found:
        yield found


@pytest.fixture(autouse=True)
def quiet(driver: Chrome) -> Iterator[None]:
    """Assert that the console has no error or warning and that nothing was fetched."""
    driver.get_log("browser")
    yield
    assert driver.get_log("browser") == []
    loaded = "return performance.getEntriesByType('resource').map(e => e.name)"
    assert driver.execute_script(loaded) == []


def one(driver: Chrome, selector: str) -> WebElement:
    return driver.find_element(By.CSS_SELECTOR, selector)


def texts(driver: Chrome, selector: str) -> list[str]:
    """Return the texts of all elements that the selector finds, visible or not."""
    find = "return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)"
    return driver.execute_script(find, selector)


def await_script(driver: Chrome, script: str, result: object) -> None:
    """Wait until the script returns ``result``; an emulation may take effect after its call."""
    WebDriverWait(driver, PATIENCE_S).until(lambda d: d.execute_script(script) == result)


@pytest.mark.slow
def test_plan_page_opens_and_works_by_keyboard(driver: Chrome, tmp_path: Path):
    driver.get(mlp_plan().save(tmp_path / "plan.html").as_uri())
    assert "square_loss" in one(driver, "h1").text
    assert [t.partition(" ")[0] for t in texts(driver, ".node .label")] == [
        "square_loss",
        "up",
        "down",
    ]
    # the dearest collective is told first
    details = one(driver, "#details").text
    assert "all_reduce over tp" in details and "Why it is here" in details
    assert "*up.weight" in details and "would remove" not in details
    assert len(texts(driver, "#details .exchange .flow")) == 4  # two ranks, each to both
    # modules by arrows: what is listed follows
    one(driver, "#modules .on").send_keys(Keys.ARROW_DOWN)
    assert one(driver, "#where").text == "up"
    assert "up.weight" in texts(driver, ".step.input .name")
    assert "down.weight" not in texts(driver, ".step.input .name")
    # steps by arrows: details follow
    one(driver, "#steps").send_keys(Keys.END)
    assert one(driver, "#steps").get_attribute("aria-activedescendant") == one(
        driver, "#steps .step.on"
    ).get_attribute("id")
    one(driver, "#steps").send_keys(Keys.HOME)
    # a tensor by its name: which rank holds what
    picker = one(driver, ".picker")
    picker.send_keys("down.weight")
    assert one(driver, ".mesh svg").get_attribute("aria-label") == "shards of f32[16,64@tp] by rank"
    assert len(texts(driver, ".mesh svg > g")) == 2


@pytest.mark.slow
def test_plan_page_shows_checked_fix_that_removes_collective(driver: Chrome, tmp_path: Path):
    driver.get(mlp_plan(turned=True, hints=True).save(tmp_path / "plan.html").as_uri())
    found = driver.execute_script(
        "const details = document.querySelector('#details');"
        "const rows = [...document.querySelectorAll('.step.comm')];"
        "return rows.map(row => { row.click(); return details.textContent; })"
    )
    assert found and all("What would remove it" in text and "dt.Shard(1)" in text for text in found)


@pytest.mark.slow
def test_pipeline_page_shows_times_memory_and_collectives(driver: Chrome, tmp_path: Path):
    driver.get(gpt_plan().save(tmp_path / "plan.html").as_uri())
    drawn = (
        "const c = document.querySelector('canvas'), g = c.getContext('2d');"
        "return new Set(new Uint32Array(g.getImageData(0, 0, c.width, c.height).data.buffer)).size"
    )
    assert driver.execute_script(drawn) > 20
    one(driver, "#tab-timeline").send_keys(Keys.ARROW_RIGHT)
    assert "at most" in one(driver, "#tab .legend").text
    assert driver.execute_script(drawn) > 20
    one(driver, "#tab-memory").send_keys(Keys.ARROW_RIGHT)
    by = [one(driver, f"[data-sort={key}]") for key in ("seconds", "bytes")]
    assert by[0].find_element(By.XPATH, "..").get_attribute("aria-sort") == "descending"
    one(driver, "[data-sort=bytes]").click()
    rows = "#tab tbody tr"
    plan = gpt_plan()
    dearest = max(c.bytes_sent * c.times for c in plan.collectives)
    assert f"{dearest / 1024:.1f} KiB" in texts(driver, rows)[0]
    driver.find_elements(By.CSS_SELECTOR, rows)[-1].send_keys(Keys.ENTER)
    assert one(driver, "#steps .step.on").is_displayed()
    # layers that are alike stand once, with how many they are
    assert any("\u00d73" in text for text in texts(driver, ".run"))
    # of a pipeline, ranks of the other stage do not hold a value
    assert len(texts(driver, ".mesh svg > g")) == 8
    # a divider by the keyboard
    before = one(driver, "#tree").size["width"]
    one(driver, "#divide-left").send_keys(Keys.ARROW_RIGHT)
    assert one(driver, "#tree").size["width"] == before + 24


@pytest.mark.slow
def test_page_title_is_model_and_legend_has_every_colour(driver: Chrome, tmp_path: Path):
    driver.get(gpt_plan().save(tmp_path / "plan.html").as_uri())
    assert driver.title == "plan of GPT (token_loss) on mesh(pp=2, dp=2, tp=2)"
    assert one(driver, "h1").text.endswith("GPT (token_loss)")
    costs = [text.split(" \u00d7")[0] for text in texts(driver, ".step .took, .node .took") if text]
    assert costs and all(text.endswith("s") and "FLOP" not in text for text in costs)
    colours = "return [...new Set([...document.querySelectorAll(arguments[0])].filter("
    colours += "e => e.offsetWidth).map(e => getComputedStyle(e).backgroundColor))]"
    colours += ".filter(c => !c.endsWith(', 0)'))"
    shown = driver.execute_script(colours, ".bar, .bar i, .cost, .cost i, .took i")
    shown += driver.execute_script(colours, ".legend .key i")  # the timeline's
    one(driver, "#tab-memory").click()
    shown += driver.execute_script(colours, ".legend .key i")
    one(driver, "#tab-legend").click()
    assert len(shown) > 10
    assert {*shown} <= {*driver.execute_script(colours, ".legend .key i")}
    groups = texts(driver, "#tab .legend > b")
    assert groups[0] == "axes" and "a rank's box" in groups and "marks" in groups


@pytest.mark.slow
def test_page_of_two_plans_compares_them_side_by_side(driver: Chrome, tmp_path: Path):
    plans = {"one way": mlp_plan(), "the other": mlp_plan(turned=True)}
    driver.get(save_pages(tmp_path / "plans.html", plans).as_uri())
    assert [card.split("tp")[0] for card in texts(driver, ".card h2")] == list(plans)
    rows = texts(driver, ".differences tbody tr")
    assert any(text.startswith("predicted") and "+" in text for text in rows)
    assert any(text.startswith("all_reduce over tp") for text in rows)
    driver.find_elements(By.CSS_SELECTOR, ".go")[1].click()
    assert "the other" in one(driver, "h1").text
    one(driver, "nav button").click()
    assert len(texts(driver, ".card")) == 2


@pytest.mark.slow
def test_page_adapts_to_narrow_window_and_dark_mode(driver: Chrome, tmp_path: Path):
    driver.get(gpt_plan().save(tmp_path / "plan.html").as_uri())
    ground = "return getComputedStyle(document.body).backgroundColor"
    light = driver.execute_script(ground)
    metrics = dict(width=900, height=700, deviceScaleFactor=1, mobile=False)
    dark = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    try:
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", dark)
        await_script(driver, "return matchMedia('(prefers-color-scheme: dark)').matches", True)
        await_script(driver, "return [innerWidth, innerHeight]", [900, 700])
        assert driver.execute_script(ground) != light
        wide = "const e = document.documentElement; return [e.scrollWidth, e.scrollHeight]"
        assert driver.execute_script(wide) == [900, 700]
        panes = {name: one(driver, f"#{name}").size for name in ("tree", "center", "side", "tab")}
        assert all(size["width"] > 150 and size["height"] > 100 for size in panes.values()), panes
    finally:
        metrics = dict(width=1280, height=860, deviceScaleFactor=1, mobile=False)
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


NAME = "</script><script>broken = 1</script><img src=x onerror='broken = 2'>"


class Named(nn.Module):
    """A model with a module whose name is markup."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module(NAME, nn.Linear(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        return self.get_submodule(NAME)(x)


@pytest.mark.slow
def test_markup_in_names_is_shown_as_text(driver: Chrome, tmp_path: Path):
    parallel = dt.parallelize(Named(), dt.Mesh(tp=2), {"*": dict(tp=dt.Replicate())})
    step = dt.train_step(parallel, square_loss, torch.optim.AdamW(parallel.parameters()))
    plan = step.plan(torch.randn(8, 16), torch.randn(8, 16))
    plans = {NAME: plan, "b": mlp_plan()}
    driver.get(save_pages(tmp_path / "plans.html", plans).as_uri())
    driver.find_elements(By.CSS_SELECTOR, ".go")[0].click()
    assert NAME in texts(driver, ".node .label")
    assert driver.title == f"{NAME} and b"
    assert driver.execute_script("return [window.broken, document.scripts.length]") == [None, 2]
