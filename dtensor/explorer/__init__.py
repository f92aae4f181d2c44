"""Saves plans as HTML pages: `plan.save("plan.html")`, or several plans side by side.

    from dtensor.explorer import save_pages
    save_pages("plans.html", {"tp4": first, "dp2tp2": second})

page.py writes the file, contents.py collects the data about a plan, and the browser runs page.html,
page.css and page.js.
"""

from dtensor.explorer.page import save_pages

__all__ = ["save_pages"]
