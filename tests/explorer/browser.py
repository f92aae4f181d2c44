"""A headless Chromium for tests of pages: `with browser() as driver: driver.get(url)`.

Without Chromium, tests that need it are skipped and the reason names what is missing; if CI is set
they fail instead.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

PROGRAMS = ("chromium", "chromedriver")
PATIENCE_S = 600.0  # for the machine: by default a script has 30 s
_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


def need_browser() -> None:
    """Skip the test, or fail it in CI, if Chromium or its driver is not installed."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing and os.environ.get("CI"):
        pytest.fail(f"no {' and no '.join(missing)}: CI installs Debian's chromium-driver")
    if missing:
        pytest.skip(f"no {' and no '.join(missing)} on this machine")


@contextmanager
def browser(
    width: int = 1280, height: int = 860, *, dark: bool = False
) -> Iterator[webdriver.Chrome]:
    """Start a browser with its own profile that records console messages."""
    options = Options()
    options.binary_location = shutil.which(PROGRAMS[0]) or PROGRAMS[0]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        for flag in (*_FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        driver = webdriver.Chrome(options, Service(shutil.which(PROGRAMS[1])))
        try:
            driver.set_page_load_timeout(PATIENCE_S)
            driver.set_script_timeout(PATIENCE_S)
            metrics = dict(width=width, height=height, deviceScaleFactor=1, mobile=False)
            driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
            if dark:
                feature = {"name": "prefers-color-scheme", "value": "dark"}
                driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
            yield driver
        finally:
            driver.quit()
