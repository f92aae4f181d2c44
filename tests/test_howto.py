"""The recipes of docs/howto, the tables of docs/coming_from and the FAQ run as they stand."""

from __future__ import annotations

import pytest

from tests.test_docs import DOCS, run_page

PAGES = sorted(
    str(page.relative_to(DOCS))
    for page in (*DOCS.glob("howto/*.md"), *DOCS.glob("coming_from/*.md"), DOCS / "faq.md")
    if page.exists() and "```python" in page.read_text()
)


@pytest.mark.slow
# peft still reads an attribute that transformers has renamed
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("page", PAGES)
def test_a_page_prints_what_it_shows(page: str) -> None:
    run_page(f"docs_{page.removesuffix('.md').replace('/', '_')}", (DOCS / page).read_text())
