"""Settings of Sphinx."""

from __future__ import annotations

import aiokv

project = "aiokv"
author = "The aiokv developers"
project_copyright = author
version = release = aiokv.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = f"aiokv {release}"

# The plan of what is being built is for those who build it.
exclude_patterns = ["_build", "plan.md"]

# A store has a `type`, and several records of the same name are documented: a name alone need not say which is meant.
suppress_warnings = ["ref.python"]
