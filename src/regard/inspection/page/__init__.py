"""The page of a view: one HTML file that loads nothing."""

from regard.inspection.page.render import notebook_html, render_page, write_page

__all__ = ["notebook_html", "render_page", "write_page"]
