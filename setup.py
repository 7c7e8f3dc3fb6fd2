"""What the package says of itself that depends on where the repository is; pyproject.toml has the
rest."""

import re
from pathlib import Path

from setuptools import setup

# The one place: https://HOST/OWNER/NAME, once there is one. Then the README's links lead there from
# the package's page. Without it they are plain text there, and the picture is left out.
ADDRESS = ""


def link(match: re.Match) -> str:
    picture, text, path = match.groups()
    if ADDRESS:
        return f"{picture}[{text}]({ADDRESS}/{'raw' if picture else 'blob'}/HEAD/{path})"
    return "" if picture else text


# Links to a heading of the page itself stay, and so do addresses.
readme = Path("README.md").read_text(encoding="utf-8")
readme = re.sub(r"(!?)\[([^]]*)\]\((?!#|https?:)([^)]*)\)", link, readme)
urls = {"Source": "", "Documentation": "/blob/HEAD/docs/index.md", "Issues": "/issues",
        "Changelog": "/blob/HEAD/CHANGELOG.md"}  # fmt: skip
setup(
    long_description=readme,
    long_description_content_type="text/markdown",
    project_urls={name: ADDRESS + path for name, path in urls.items()} if ADDRESS else {},
)
