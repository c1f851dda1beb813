"""Build the website into build/site. The first argument is another folder, if there is one."""

import sys
from pathlib import Path

from docs.site.build import build_site

ROOT = Path(__file__).parents[2]

site = build_site(ROOT, Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "site")
print(f"{site / 'index.html'}: open it through a web server: python3 -m http.server --directory {site.parent}")
