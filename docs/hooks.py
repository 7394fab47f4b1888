"""For the site: files outside docs/ that pages link to, and formulas as MathML.

In the repository pages link to `../results/x.png` or `../tests/x.py`. The site has these files, and
what they link to in turn, in its folder `repository`; Python, notebooks and folders become pages.
"""

import html as entities
import json
import posixpath
import re
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|[#/])[^)#\s]+")
ALWAYS = ["CHANGELOG.md", "examples/notebook.ipynb"]
MOVED = {"CHANGELOG.md": "changelog.md", "README.md": "index.md"}
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)

origins = {}  # from the place of a page on the site to that of its source in the repository


def on_files(files, config):
    """Adds the files that pages link to."""
    for page in files.documentation_pages():
        origins[page.src_uri] = f"docs/{page.src_uri}"
    waiting = ALWAYS + [
        target
        for place, source in origins.items()
        for target in _targets((ROOT / source).read_text(), place).values()
    ]
    while waiting:
        source = waiting.pop()
        place = _place(source)
        if files.get_file_from_path(place):
            continue
        if place.endswith(".md"):
            origins[place] = source
            text = _as_markdown(ROOT / source)
            waiting += _targets(text, place).values()
            files.append(File.generated(config, place, content=text))
        else:
            files.append(File.generated(config, place, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown, page, **_):
    """Links lead to the places that files have on the site."""
    place = page.file.src_uri
    targets = _targets(markdown, place)

    def on_site(link):
        target = targets.get(link[0])
        return posixpath.relpath(_place(target), posixpath.dirname(place)) if target else link[0]

    return LINK.sub(on_site, markdown)


def on_page_content(html, **_):
    """Browsers draw MathML by themselves: no script is needed."""

    def mathml(formula):
        display = "inline" if formula[1] == "span" else "block"
        return convert(entities.unescape(formula[2]), display=display)

    return FORMULA.sub(mathml, html)


def _targets(markdown, place):
    """The links of a page that lead to a file of the repository, and the path of that file."""
    source = origins[place]
    folder = source if (ROOT / source).is_dir() else posixpath.dirname(source)
    links = {
        link: posixpath.normpath(posixpath.join(folder, link)) for link in LINK.findall(markdown)
    }
    return {link: path for link, path in links.items() if (ROOT / path).exists()}


def _place(source):
    """Where a file of the repository is on the site."""
    if source in MOVED or source.startswith("docs/"):
        return MOVED.get(source, source.removeprefix("docs/"))
    if (ROOT / source).is_dir():
        index = "README.md" if (ROOT / source / "README.md").exists() else "index.md"
        return f"repository/{source}/{index}"
    return f"repository/{source}" + ".md" * source.endswith((".py", ".ipynb"))


def _as_markdown(path):
    """A page that shows a file or a folder."""
    title = f"# {path.relative_to(ROOT)}\n\n"
    if path.is_dir():
        names = sorted(entry.name for entry in path.iterdir() if entry.name[0] not in "._")
        return title + "".join(f"- [{name}]({name})\n" for name in names)
    text = path.read_text()
    if path.suffix == ".ipynb":
        return "\n\n".join(part for cell in json.loads(text)["cells"] for part in _parts(cell))
    return f"{title}````python\n{text}````\n" if path.suffix == ".py" else text


def _parts(cell):
    """The text of a notebook's cell and its outputs."""
    source = "".join(cell["source"])
    yield source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```"
    for output in cell.get("outputs", []):
        data = output.get("data", {"text/plain": output.get("text", [])})
        if "image/png" in data:
            png = "".join(data["image/png"]).replace("\n", "")
            yield f'<img alt="{cell["metadata"]["alt"]}" src="data:image/png;base64,{png}">'
        else:
            yield "```text\n" + "".join(data["text/plain"]).rstrip("\n") + "\n```"
