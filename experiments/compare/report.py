"""The comparison page: one HTML file that holds its data, works from disk and asks the network for nothing.

`page/` has the template, the style and the scripts; Plotly's "cartesian" bundle lies beside them with its licence. What is averaged is
averaged in Python: the page shows the numbers of `compare` and computes none.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from experiments.compare.page_data import page_data
from experiments.runs.files import write_whole

PAGE = Path(__file__).parent / "page"
SCRIPTS = {"plotly": "plotly-cartesian.min.js", "charts": "charts.js", "selection": "selection.js", "script": "page.js"}


def write_report(
    study_dir: Path | str,
    path: Path | str,
    by: str | Iterable[str] | None = None,
    metric: str | Iterable[str] | None = None,
    baseline: str | Mapping[str, Any] | None = None,
) -> Path:
    """Write the page of a study, whole or not at all; the arguments are those of `compare`. Returns its path."""
    path = Path(path)
    page = render(page_data(study_dir, by, metric, baseline))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, page)
    return path


def render(data: Mapping[str, Any]) -> bytes:
    """The page that shows `data`."""
    scripts = {name: (PAGE / file).read_text(encoding="utf-8") for name, file in SCRIPTS.items()}
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in scripts.values())
    # Plotly writes its own style element; nothing but these scripts runs, and nothing at all is fetched.
    policy = f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'"
    # In JSON "<" only stands inside strings; without it no string can end the element or open a comment.
    inlined = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    style = (PAGE / "page.css").read_text(encoding="utf-8")
    parts = {"title": html.escape(data["study"]), "policy": policy, "style": style, "data": inlined, **scripts}
    template = (PAGE / "page.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template).encode("utf-8", errors="replace")
