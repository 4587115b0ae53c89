"""`plait evaluate`: a training run on held-out data."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from plait.cli.common import device, positive, print_json, print_table, say, threads
from plait.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Perplexity by language; BLEU and chrF2 of a translation model; bits per byte and continuations of a language"
        " model; routing of a mixture of experts. Figures, texts and plots go to a directory of the run."
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="the directory of a training run")
    parser.add_argument("--split", default="test", choices=("test", "valid"), help="default: test")
    parser.add_argument("--step", type=positive, metavar="N", help="of the checkpoint (default: the best one)")
    parser.add_argument(
        "--limit", type=positive, metavar="N", help="pairs or documents for which texts are made (default: all)"
    )
    parser.add_argument("--no-texts", action="store_true", help="neither translations nor continuations")
    parser.add_argument("--batch-tokens", type=positive, default=16_384, metavar="N", help="default: 16384")
    parser.add_argument("--max-new-tokens", type=positive, default=200, metavar="N", help="of a translation")
    parser.add_argument(
        "--beams", type=positive, default=1, metavar="W", help="translate with W beams (default: greedy)"
    )
    parser.add_argument(
        "--bleu-tokenizer",
        action="append",
        default=[],
        metavar="LANG=NAME",
        help="sacrebleu's tokenizer for a language, such as ja=char (default: ja-mecab, zh, ko-mecab, else 13a)",
    )
    parser.add_argument(
        "--against",
        type=Path,
        metavar="DIR",
        help="files of another evaluation of the same pairs: paired bootstrap of BLEU and chrF2 against its texts",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="where files go (default: RUN/evaluation)")
    parser.add_argument("--no-plots", action="store_true", help="figures and texts only")
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON document")
    parser.add_argument("--device", default="cpu", type=device, help="cpu, cuda, cuda:1, ... (default: cpu)")
    parser.add_argument("--threads", type=threads, metavar="N", help="CPU threads (default: all that may be used)")


def run(args: argparse.Namespace) -> int:
    import torch

    from plait.kernels.native import usable_cpus
    from plait.training.evaluate import Settings, compare, evaluate
    from plait.training.progress import make_display

    torch.set_num_threads(args.threads or usable_cpus())
    if args.against is not None and args.no_texts:
        raise UsageError("--against compares translations: leave --no-texts out")
    settings = Settings(
        split=args.split,
        step=args.step,
        limit=args.limit,
        batch_tokens=args.batch_tokens,
        max_new_tokens=args.max_new_tokens,
        width=args.beams,
        tokenizers=dict(_language(word) for word in args.bleu_tokenizer),
        texts=not args.no_texts,
        device=args.device,
    )
    display = make_display(0)
    try:
        found = evaluate(args.run, settings, display.stage)
    finally:
        display.close()
    if args.against is not None:
        found.figures["against"] = compare(found, args.against, settings)
    directory = args.out or args.run / "evaluation"
    written = found.save(directory)
    if not args.no_plots:
        from plait.studies.run_plots import plot_run

        written += plot_run(args.run, found.figures, directory)
    if args.json:
        print_json(found.figures)
    else:
        show(found.figures)
    say(f"written: {', '.join(str(path) for path in written)}")
    return 0


def _language(word: str) -> tuple[str, str]:
    language, equals, name = word.partition("=")
    if not (language and equals and name):
        raise UsageError(f"--bleu-tokenizer {word}: write LANGUAGE=NAME, such as ja=char")
    return language, name


def show(figures: dict[str, Any]) -> None:
    """Tables of the figures."""
    print(f"{figures['run']}, {figures['checkpoint']}, {figures['split']} split ({figures['task']})")
    rows = [(name, *_loss(part)) for name, part in figures.get("languages", {}).items()]
    print_table(("", "targets", "loss", "perplexity"), [*rows, ("all", *_loss(figures))])
    if figures.get("bits_per_byte") is not None:
        print(f"bits per byte {figures['bits_per_byte']:.4f} ({figures['bytes']:,} bytes)")
    translation = figures.get("translation")
    if translation:
        print_table(
            (translation["strategy"], "pairs", "BLEU", "95%", "chrF2", "95%", "ended"),
            [_scores(name, part) for name, part in translation["languages"].items()],
        )
        for part in translation["languages"].values():
            print(part["bleu"]["signature"])
    against = figures.get("against")
    if against:
        print_table(
            (f"against {against['directory']}", "metric", "this", "that", "p"),
            [
                (name, one["name"], f"{one['a']:.2f}", f"{one['b']:.2f}", f"{one['p_value']:.4f}")
                for name, part in against["languages"].items()
                for one in part
            ],
        )
    continued = figures.get("continuations")
    if continued:
        print(f"{continued['documents']} continuations, BLEU {continued['bleu']['score']:.2f}")
        for name, value in continued["metrics"].items():
            if value is not None:
                print(f"{name} {value:.4f}  ({continued['formulas'][name]})")
    experts = figures.get("experts")
    if experts and experts["separation"]:
        print_table(
            ("total variation distance", *(f"layer {layer}" for layer in experts["layers"])),
            [(name, *(f"{v:.3f}" for v in values)) for name, values in experts["separation"].items()],
        )


def _loss(part: dict[str, Any]) -> tuple[str, str, str]:
    if part["loss"] is None:
        return ("0", "-", "-")
    return (f"{part['targets']:,}", f"{part['loss']:.4f}", f"{part['perplexity']:,.3f}")


def _scores(name: str, part: dict[str, Any]) -> tuple[str, ...]:
    row = [name, f"{part['pairs']:,}"]
    for score in (part["bleu"], part["chrf2"]):
        row += [f"{score['score']:.2f}", f"{score['low']:.2f} .. {score['high']:.2f}"]
    return (*row, f"{part['ended']:.0%}")
