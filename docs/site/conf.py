"""The site: pages of the repository where they lie, the Python reference from docstrings, and the gallery."""

import posixpath
import re
from pathlib import Path

import longspan

REPOSITORY = Path(__file__).parents[2]
ON_GITHUB = "https://github.com/longspan/longspan"

project = "Longspan"
author = "The Longspan developers"
copyright = author
version = release = longspan.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "numpydoc", "sphinx.ext.viewcode", "sphinx.ext.githubpages",
              "sphinx_gallery.gen_gallery"]  # fmt: skip
root_doc = "docs/site/index"
include_patterns = ["docs/**", "python/README.md", "benchmarks/README.md", "CHANGELOG.md"]
exclude_patterns = [".git", "target", "**/target", "docs/site/gallery/*.py"]
# Docstrings name things in single backticks; what is not of this package stays as it is.
default_role = "py:obj"
myst_heading_anchors = 3

autodoc_typehints = "none"
autodoc_member_order = "bysource"
numpydoc_show_class_members = False

sphinx_gallery_conf = {
    "examples_dirs": "python/examples/gallery",
    "gallery_dirs": "docs/site/gallery",
    "filename_pattern": "",
    "within_subsection_order": "FileNameSortKey",
    "download_all_examples": False,
    "show_signature": False,
    "write_computation_times": False,
}

html_theme = "furo"
html_title = f"Longspan {release}"
html_extra_path = ["redirect"]
html_theme_options = {"source_repository": ON_GITHUB, "source_branch": "main"}


def setup(app):
    app.connect("source-read", links)


def links(app, page, source):
    """Links between pages of the site stay on it, those to other files of the repository go to GitHub."""
    pages = app.env.found_docs
    folder = posixpath.dirname(page)

    def link(match):
        path, anchor = match["path"], match["anchor"] or ""
        on_github = re.match(rf"{ON_GITHUB}/(?:blob|tree)/main/(.*)", path)
        inside = on_github[1] if on_github else posixpath.normpath(posixpath.join(folder, path))
        for target in (inside, f"{inside}/README.md"):
            if target.endswith(".md") and target[:-3] in pages:
                return f"](/{target}{anchor})"
        if on_github or not (REPOSITORY / inside).exists() or Path(inside).suffix == ".svg":
            return match[0]
        return f"]({ON_GITHUB}/{'tree' if (REPOSITORY / inside).is_dir() else 'blob'}/main/{inside}{anchor})"

    source[0] = re.sub(r"\]\((?P<path>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)", link, source[0])
