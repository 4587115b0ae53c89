"""Reports: one JSON document per benchmark, and the same as a table for a terminal or for a Markdown page.

A report has "bench", "date", "commit", "machine", "versions", "model", "settings", "engines" ({side: {"plan", "isa",
"weights", "kv_dtype", as far as the side says}}), "rows" and "notes". A row is what one task
gave: {"task", "unit", "better": "higher" | "lower", "sides": {name: Summary}, "ratios": {peer: plait / peer},
"limit": {"name", "value"} in the row's unit or None, "details": {text: value}}.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from plait.bench.limits import origin
from plait.bench.summary import Summary, significant

OURS = "plait"
_TELLING_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "asimddp", "i8mm", "sve")


def start_report(
    bench: str,
    path: Path | None,
    versions: Mapping[str, str],
    settings: dict[str, Any],
    engines: Mapping[str, Mapping[str, str]] | None = None,
) -> dict[str, Any]:
    """A report without rows. path: the model's file or directory. engines: what each side computes with."""
    import plait

    model = None
    if path is not None:
        size = path.stat().st_size if path.is_file() else sum(f.stat().st_size for f in path.glob("*.safetensors"))
        model = {"name": path.stem if path.is_file() else path.resolve().name, "bytes": size}
    return {
        "bench": bench,
        **origin(),
        "versions": {"plait": plait.__version__, **versions},
        "model": model,
        "settings": settings,
        "engines": {name: dict(engine) for name, engine in (engines or {}).items()},
        "rows": [],
        "notes": [],
    }


def make_row(
    task: str,
    unit: str,
    sides: Mapping[str, Sequence[float]],
    *,
    better: str = "higher",
    limit: tuple[str, float] | None = None,
    details: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """sides: the values of the alternations by side, ours under "plait". limit: its name, and what it allows."""
    summaries = {name: Summary(list(values)) for name, values in sides.items()}
    ours = summaries.get(OURS)
    ratios = {
        name: significant(ours.median / summary.median)
        for name, summary in summaries.items()
        if ours is not None and name != OURS and summary.median
    }
    return {
        "task": task,
        "unit": unit,
        "better": better,
        "sides": {name: summary.to_json() for name, summary in summaries.items()},
        "ratios": ratios,
        "limit": {"name": limit[0], "value": significant(limit[1])} if limit and limit[1] > 0 else None,
        "details": {name: value for name, value in (details or {}).items() if value != {}},
    }


def text_lines(report: Mapping[str, Any]) -> list[str]:
    """The report for a terminal."""
    lines = [f"plait bench {report['bench']}" + _of(report), origin_line(report), _settings(report)]
    lines += engine_lines(report)
    for row in report["rows"]:
        unit = f"{row['unit']}, " if row["unit"] else ""
        lines += ["", f"{row['task']} ({unit}{row['better']} is better)"]
        table = [("", "median", "min", "max", "plait is", "of the limit")]
        for name, side in row["sides"].items():
            table.append(
                (name, *(number(side[key]) for key in ("median", "min", "max")), _ratio(row, name), _share(row, name))
            )
        lines += aligned(table)
        if row["limit"]:
            lines.append(f"limit: {row['limit']['name']}: {number(row['limit']['value'])} {row['unit']}")
        lines += [f"{key}: {_detail(value)}" for key, value in row["details"].items()]
    return [*lines, *report["notes"]]


def markdown_lines(report: Mapping[str, Any]) -> list[str]:
    """The report as a section of a Markdown page, with where it was measured and with what."""
    lines = [f"## plait bench {report['bench']}{_of(report)}", ""]
    lines += [f"{origin_line(report)}.", "", f"{_settings(report)}.", ""]
    if engines := engine_lines(report):
        lines += [*(f"- {line}" for line in engines), ""]
    lines += ["| task | side | median | min - max | plait is | share of the limit |", "|---|---|---|---|---|---|"]
    for row in report["rows"]:
        for i, (name, side) in enumerate(row["sides"].items()):
            task = _task(row) if i == 0 else ""
            span = f"{number(side['min'])} - {number(side['max'])}"
            shown = f"**{number(side['median'])}**" if name == OURS else number(side["median"])
            lines.append(f"| {task} | {name} | {shown} | {span} | {_ratio(row, name)} | {_share(row, name)} |")
    notes = [
        f"- {row['task']}: limit by {row['limit']['name']}: {number(row['limit']['value'])} {row['unit']}"
        for row in report["rows"]
        if row["limit"]
    ]
    notes += [f"- {row['task']}: {key}: {_detail(v)}" for row in report["rows"] for key, v in row["details"].items()]
    notes += [f"- {note}" for note in report["notes"]]
    return [*lines, "", *notes, *([""] if notes else [])]


def origin_line(report: Mapping[str, Any]) -> str:
    """Date, commit and machine in one line."""
    commit = f", commit {report['commit']}" if report.get("commit") else ""
    return f"{report['date']}{commit}: {machine_line(report)}"


def engine_lines(report: Mapping[str, Any]) -> list[str]:
    """A line per side: what computes, and the precision of its keys and values."""
    lines = []
    for name, engine in report.get("engines", {}).items():
        plan = (
            [f"{engine['plan']} plan" + (f" ({engine['isa']})" if "isa" in engine else "")] if "plan" in engine else []
        )
        weights = [f"weights {engine['weights']}"] if "weights" in engine else []
        lines.append(f"{name}: {', '.join([*plan, *weights, 'keys and values ' + engine['kv_dtype']])}")
    return lines


def machine_line(report: Mapping[str, Any]) -> str:
    """CPU, memory, system, kernels and versions in one line."""
    m = report["machine"]
    flags = [name for name in _TELLING_FLAGS if name in m["flags"]]
    kernels = f"kernels {m['kernels']}" if m["kernels"] else "no native library"
    versions = ", ".join(f"{name} {value}" for name, value in report["versions"].items())
    return (
        f"{m['cpu']} ({', '.join(flags) or 'no known flags'}), {m['usable_cpus']} CPUs usable,"
        f" {m['memory_bytes'] / 2**30:.0f} GiB, {m['system']}; {kernels}; {versions}"
    )


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns of text: the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))).rstrip()
        for row in rows
    ]


def number(value: float) -> str:
    """A number for a table: three or four digits that mean something, no exponent."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    if size >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if size >= 10 else f"{value:.2f}" if size >= 1 else f"{value:.3g}"


def times(ratio: float) -> str:
    """2.345 -> "2.35x"."""
    return f"{ratio:.2f}x" if ratio < 100 else f"{ratio:.0f}x"


def _settings(report: Mapping[str, Any]) -> str:
    return "; ".join(
        f"{key.replace('_', ' ')}: {value}" for key, value in report["settings"].items() if value is not None
    )


def _task(row: Mapping[str, Any]) -> str:
    return f"{row['task']}, {row['unit']}" if row["unit"] else row["task"]


def _of(report: Mapping[str, Any]) -> str:
    model = report.get("model")
    return f", {model['name']} ({model['bytes'] / 1e6:,.0f} MB)" if model else ""


def _ratio(row: Mapping[str, Any], name: str) -> str:
    return times(row["ratios"][name]) if name in row["ratios"] else ""


def _share(row: Mapping[str, Any], name: str) -> str:
    if not row["limit"] or name != OURS:
        return ""
    return f"{row['sides'][name]['median'] / row['limit']['value']:.0%}"


def _detail(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_detail(item)}" for key, item in value.items())
    if isinstance(value, float):
        return number(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


def page(title: str, reports: Iterable[Mapping[str, Any]], command: str) -> str:
    """A page of `benchmarks/`: a section per report, each with its own date, commit and machine."""
    lines = [f"# {title}", "", f"Written by `{command}`.", ""]
    lines += [
        "Within a section all sides run in turn, on the same prompt ids; figures are medians of the alternations."
    ]
    lines += ["Sections are runs of their own: each names its date, commit and machine."]
    for document in reports:
        lines += ["", *markdown_lines(document)]
    return "\n".join(lines).rstrip() + "\n"


def origins(reports: Iterable[Mapping[str, Any]]) -> list[str]:
    """The different (machine, kernels, date, commit) of reports, in words, with the benchmarks of each."""
    found: dict[str, list[str]] = {}
    for report in reports:
        machine = report["machine"]
        line = f"{machine['usable_cpus']} CPUs of {machine['cpu']}, kernels {machine['kernels']}, {report['date']}"
        line += f", commit {report['commit']}" if report.get("commit") else ""
        model = f" of {report['model']['name']}" if report.get("model") else ""
        found.setdefault(line, []).append(f"{report['bench']}{model}")
    if len(found) == 1:
        return list(found)
    return [f"{line} ({', '.join(names)})" for line, names in found.items()]


def summary_table(reports: Iterable[Mapping[str, Any]]) -> list[str]:
    """The README's table: per task ours, the peer's on the same file, and the ratios to all peers."""
    lines = [
        "| model | task | plait | llama.cpp, same file | plait is | beside others |",
        "|---|---|---|---|---|---|",
    ]
    for report in reports:
        name = report["model"]["name"] if report["model"] else ""
        for row in report["rows"]:
            same = row["sides"].get("llama-cpp")
            ours = row["sides"].get(OURS)
            if ours is None or same is None:
                continue
            others = ", ".join(
                f"{times(ratio)} {peer.removeprefix('llama-cpp ')}"
                for peer, ratio in row["ratios"].items()
                if peer != "llama-cpp"
            )
            lines.append(
                f"| {name} | {_task(row)} | {number(ours['median'])} | {number(same['median'])} |"
                f" {_ratio(row, 'llama-cpp')} | {others} |"
            )
    return lines
