"""`plait inspect`: what is in a checkpoint, what its forward does, and what a text does in it."""

from __future__ import annotations

import argparse
from typing import Any

from plait.cli.common import add_adapter_flag, add_load_flags, load_decoder, positive, print_json, print_table
from plait.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Read a checkpoint's headers; with --plan or --trace also show its forward."
    parser.add_argument("model", nargs="?", metavar="PATH", help="as for generate; with --plan also a config.json")
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parser.add_argument(
        "--plan", action="store_true", help="the operations of one step: shapes, bytes, FLOPs per token"
    )
    parser.add_argument("--batch", type=positive, metavar="B", help="with --plan: every shape for B sequences ...")
    parser.add_argument("--length", type=positive, metavar="L", help="... of L tokens")
    parser.add_argument("--training", action="store_true", help="with --batch: as in training, logits of all tokens")
    parser.add_argument("--trace", metavar="TEXT", help="run a text: shapes, norms, largest attention weights")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    add_load_flags(parser)
    add_adapter_flag(parser, "with --trace: merged into the weights")
    parser.set_defaults(device=None, dtype=None)  # to tell a flag that was given


def run(args: argparse.Namespace) -> int:
    modes = [flag for flag in ("tensors", "plan", "trace") if getattr(args, flag)]
    if len(modes) > 1:
        raise UsageError(f"--{modes[0]} and --{modes[1]} exclude each other")
    mode = modes[0] if modes else _FACTS
    _refuse_unused(args, mode)
    args.device, args.dtype = args.device or "cpu", args.dtype or "auto"
    document, show = _MODES[mode](args)
    if args.json:
        print_json(document)
    else:
        show(document)
    return 0


def _refuse_unused(args: argparse.Namespace, mode: str) -> None:
    """UsageError for a flag that this mode would ignore."""
    for flag in sorted(set().union(*_FLAGS.values())):
        if getattr(args, flag) not in (None, False) and flag not in _FLAGS[mode]:
            owners = [f"--{name}" if name != _FACTS else "inspect alone" for name, own in _FLAGS.items() if flag in own]
            raise UsageError(f"--{flag} would be ignored: it belongs to {' or '.join(owners)}")


def _facts(args: argparse.Namespace) -> Any:
    from plait.weights.inspect import inspect_checkpoint

    return inspect_checkpoint(args.model, args.strict), _show_facts


def _tensors(args: argparse.Namespace) -> Any:
    from plait.weights.inspect import tensor_table

    return tensor_table(args.model), _show_tensors


def _plan(args: argparse.Namespace) -> Any:
    from plait.engine.explain import plan

    return plan(args.model, args.dtype, args.batch, args.length, args.training, args.strict), _show_plan


def _trace(args: argparse.Namespace) -> Any:
    from plait.engine.explain import trace_text

    return trace_text(*load_decoder(args), args.trace), _show_trace


_FACTS = "facts"
# What each mode reads, beside --json.
_FLAGS = {
    _FACTS: {"strict"},
    "tensors": set[str](),
    "plan": {"dtype", "strict", "batch", "length", "training"},
    "trace": {"device", "dtype", "threads", "strict", "adapter"},
}
_MODES = {_FACTS: _facts, "tensors": _tensors, "plan": _plan, "trace": _trace}


def _show_facts(facts: dict[str, Any]) -> None:
    config, tensors, memory = facts["config"], facts["tensors"], facts["memory"]
    print(f"{facts['path']} ({facts['format']})")
    if not facts["supported"]:
        print(f"plait cannot run this model: {facts['problem']}")
    _section("configuration")
    lines = config["switches"] if facts["supported"] else config["raw"].items()
    for name, value in lines:
        print(f"  {name:<18} {value}")
    if facts["supported"]:
        counts = ", ".join(f"{k} {v:,}" for k, v in config["parameters"].items() if k not in ("total", "active") and v)
        total, active = config["parameters"]["total"], config["parameters"]["active"]
        of_them = "" if active == total else f", {active:,} active for a token"
        print(f"  {'parameters':<18} {total:,}{of_them} ({counts})")
    if facts["quantisation"]:
        known = facts["quantisation"]
        print(f"  {'quantised':<18} {known['title']}: {known['weights']:,} weights")
    _section(f"tensors: {tensors['count']:,} in {tensors['files']} file(s), {_size(tensors['bytes'])}")
    rows = [
        (f"  {name}", f"{f['tensors']:,}", f"{f['numbers']:,}", _size(f["bytes"]))
        for name, f in tensors["formats"].items()
    ]
    print_table(("  format", "tensors", "numbers", "size"), rows)
    for tensor in tensors["largest"][:3]:
        print(f"  largest: {tensor['name']} {tensor['shape']} {tensor['format']} {_size(tensor['bytes'])}")
    _section("tokenizer")
    for name, value in (facts["tokenizer"] or {"kind": "none found"}).items():
        if value not in (None, []):
            print(f"  {name:<18} {value}")
    template = facts["chat_template"]
    print(f"  {'chat template':<18} {f'{len(template):,} characters' if template else 'none'}")
    if template:
        print("\n".join(f"    | {line}" for line in template.splitlines()[:6]))
    _show_memory(memory)


def _show_memory(memory: dict[str, Any]) -> None:
    _section("memory")
    expanded = ", ".join(f"{_size(size)} in {name}" for name, size in memory["weights_bytes"].items())
    print(f"  {'weights':<18} {_size(memory['weights_stored_bytes'])} as stored, {expanded}")
    if "kv_bytes_per_token" in memory:
        per_token = ", ".join(f"{size / 1024:.1f} KiB in {name}" for name, size in memory["kv_bytes_per_token"].items())
        print(f"  {'keys and values':<18} {per_token} per token")
        print(
            f"  {'full context':<18} {_size(memory['kv_bytes_per_full_request'])} in bf16 for"
            f" {memory['context_tokens']:,} tokens, blocks outside windows recycled"
        )
        print(
            f"  {'fits here':<18} {memory['full_requests_beside_bf16_weights']:,} such requests beside bf16 weights in"
            f" the {_size(memory['available_bytes'])} that are free"
        )


def _show_tensors(rows: list[dict[str, Any]]) -> None:
    lines = [(row["name"], str(row["shape"]), row["format"], f"{row['bytes']:,}") for row in rows]
    print_table(("tensor", "shape", "format", "bytes"), lines)


def _show_plan(plan: dict[str, Any]) -> None:
    from plait.model.describe import ranges

    sized = plan["batch"] is not None
    per = "forward" if sized else "token"
    header = ("operation", "shapes", f"FLOPs/{per}", "weight bytes", f"bytes/{per}", "weights, attributes")
    rows: list[tuple[str, ...]] = []
    layers = None
    for row in plan["operations"]:
        if row["layers"] != layers:
            layers = row["layers"]
            times = f"layers {ranges(layers)} ({len(layers)} times)" if layers else "once"
            rows.append((times, "", "", "", "", ""))
        rows.append(_plan_line(row, sized))
    print_table(header, rows)
    total = plan["totals"]
    keys = "" if sized else f" + {total['flops_per_key']:,} per visible key"
    print(
        f"\n{total['operations']:,} operations, {total['flops']:,} FLOPs a {per}{keys},"
        f" weights {_size(total['weight_bytes'])} at {plan['bytes_per_number']} bytes a number,"
        f" of which a step reads {_size(total['weight_bytes_read_per_step'])}"
    )


def _plan_line(row: dict[str, Any], sized: bool) -> tuple[str, ...]:
    from plait.ops.report import shape_text

    attributes = " ".join(f"{name}={value}" for name, value in row["attributes"].items())
    per_key = "" if sized or not row["flops_per_key"] else f"{row['flops_per_key']:,}/key"
    weights = " ".join(f"{name}{shape}" for name, shape in row["weights"])
    return (
        "  " + row["op"],
        f"{shape_text(row['inputs'])} -> {shape_text(row['outputs'])}",
        " + ".join(part for part in (f"{row['flops']:,}" if row["flops"] or not per_key else "", per_key) if part),
        f"{row['weight_bytes']:,}",
        f"{row['activation_bytes']:,}",
        f"{weights} {attributes}".strip(),
    )


def _show_trace(found: dict[str, Any]) -> None:
    tokens = [token["text"] for token in found["tokens"]]
    # Under an `attend`: the largest attention weights of the text's last token.
    print("tokens: " + " ".join(f"{i}:{text!r}" for i, text in enumerate(tokens)))
    for row in found["operations"]:
        shapes = " ".join(map(str, row["shapes"]))
        print(f"{row['op']:<12} {shapes:<24} rms {row['rms']:<10.4g} max {row['max']:<10.4g} {row['weight'] or ''}")
        for head, key, weight in row.get("attention", ()):
            print(f"  layer {row['layer']} head {head}: {weight:.3f} on {key}:{tokens[key]!r}")
    print("next: " + ", ".join(f"{token['text']!r} {token['logprob']:.3f}" for token in found["next"]))


def _section(title: str) -> None:
    print(f"\n{title}")


def _size(size: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size / scale:,.2f} {unit}"
    return f"{size} B"
