"""write_report: from saved runs to a folder of tables, figures, and a README that shows them all."""

import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import dustin_hf
from dustin_hf.eval.report.accuracy import accuracy_sections
from dustin_hf.eval.report.attention import kernel_sections, overhead_sections, prefill_sections
from dustin_hf.eval.report.books import book_sections
from dustin_hf.eval.report.decoding import decode_sections
from dustin_hf.eval.report.folder import check_folder, publish
from dustin_hf.eval.report.layout import Section, Table
from dustin_hf.eval.report.needles import needle_sections
from dustin_hf.eval.report.recovery import fidelity_sections, study_sections
from dustin_hf.eval.report.sources import Source, read_sources

# By kind of run, in the order of the report.
SECTIONS: dict[str, Callable[[Sequence[Source]], list[Section]]] = {
    "longbench": accuracy_sections,
    "ruler": needle_sections,
    "decode": decode_sections,
    "kernels": kernel_sections,
    "overhead": overhead_sections,
    "prefill": prefill_sections,
    "pg19": book_sections,
    "fidelity": fidelity_sections,
    "study": study_sections,
}


def write_report(paths: Iterable[str | Path], out: str | Path, force: bool = False) -> list[Path]:
    """Turn saved runs into the paper's tables and figures.

    `out` gets `README.md`, which shows everything with its conditions, `tables/` (Markdown and CSV), `figures/` (PNG
    and SVG), and a list of these files.

    Args:
        paths: see `read_sources`; any mix.
        out: folder, made if absent.
        force: overwrite an earlier report there; files of anybody else are never touched.

    Returns:
        The files.

    Raises:
        FileNotFoundError: if a path does not exist.
        ValueError: if a run cannot be told or read, or `out` holds something.
        ModuleNotFoundError: without matplotlib.
    """
    out = Path(out)
    earlier = check_folder(out, force)
    sources = read_sources(paths)
    sections = [
        section
        for kind, make in SECTIONS.items()
        if (members := [source for source in sources if source.kind == kind])
        for section in make(members)
    ]
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as folder:
        made = Path(folder)
        readme = _Readme(made)
        for section in sections:
            readme.add(section)
        readme.end(len(sources))
        return publish(made, out, earlier)


class _Readme:
    """Writes the files of sections into a folder, and what shows them."""

    def __init__(self, folder: Path):
        self.folder, self.names = folder, set[str]()
        self.contents: list[str] = []
        self.parts: list[str] = []
        (folder / "tables").mkdir()

    def add(self, section: Section) -> None:
        """One section, its tables and figures."""
        title = self._unused(section.title, " (%d)")
        self.contents.append(title)
        self.parts += [f"## {title}", section.conditions]
        for table in section.tables:
            name = self._write(table, section.conditions)
            files = f"[CSV](tables/{name}.csv), [Markdown](tables/{name}.md)"
            self.parts += [f"**{table.title}.** {table.caption} {files}", table.markdown()]
        for drawing in section.drawings:
            paths = drawing.draw(self.folder / "figures" / self._unused(drawing.name))
            shown = [path.relative_to(self.folder).as_posix() for path in paths]
            images = "\n".join(f"![{Path(path).stem}]({path})" for path in shown if path.endswith(".png"))
            if images:
                links = ", ".join(f"[{Path(path).stem}.svg]({path})" for path in shown if path.endswith(".svg"))
                self.parts += [f"**Figure.** {drawing.caption} {links}", images]

    def end(self, runs: int) -> None:
        """Write README.md."""
        head = (
            f"Made by `dustin-hf report` (dustin_hf {dustin_hf.__version__}) from {runs} saved run{'s' * (runs > 1)}. "
            "The conditions of a section are those of all its tables and figures. - is a value that no run holds, or "
            "that does not apply."
        )
        listed = "\n".join(f"- {title}" for title in self.contents)
        text = "\n\n".join(["# Results", head, listed, *self.parts]) + "\n"
        (self.folder / "README.md").write_text(text, encoding="utf-8")

    def _write(self, table: Table, conditions: str) -> str:
        """Its two files; their name."""
        name = self._unused(table.name)
        text = f"# {table.title}\n\n{table.markdown()}\n\n{table.caption}\n\n{conditions}\n"
        (self.folder / "tables" / f"{name}.md").write_text(text, encoding="utf-8")
        (self.folder / "tables" / f"{name}.csv").write_text(table.csv(), encoding="utf-8")
        return name

    def _unused(self, name: str, pattern: str = "-%d") -> str:
        """The name, with a number where it was given before."""
        unused, number = name, 1
        while unused in self.names:
            number += 1
            unused = name + pattern % number
        self.names.add(unused)
        return unused
