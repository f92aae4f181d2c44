"""Plans as pages for a browser: `plan.save("plan.html")`, and several side by side.

    from dtensor.explorer import save_pages
    save_pages("plans.html", {"tp4": first, "dp2tp2": second})

- page.py: the file. contents.py: what it shows of a plan. tree.py: its modules. reasons.py: why.
- times.py: the simulated timeline. page.html, page.css, page.js: what the browser runs.
"""

from dtensor.explorer.page import save_pages

__all__ = ["save_pages"]
