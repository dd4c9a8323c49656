"""`python -m engine_agent.engines.medusa train --model DIR --output DIR`: trains Medusa heads for a model.

The model answers prompts, heads are trained on these answers and evaluated on answers about other products, and an
artifact with its calibration is written. Needs torch, transformers and safetensors, but no vLLM. Run by hand. The last
line of standard output is the artifact as JSON. Run again with the same options after an interruption: it continues
where it stopped.

Exit status: 1 with the reason; 75 (EX_TEMPFAIL) after `--limit-s`: run it again."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine_agent.engines.artifacts import describe_folder, read_manifest
from engine_agent.engines.medusa.prompts import FAMILIES, prompts
from engine_agent.protocol.manifest import MANIFEST_NAME, BadArtifact

EXIT_OUT_OF_TIME = 75
TOP_K = 10
"""Ranks of a head that are distinguished; NxD reads as many."""
ANSWERS = {"chat": (352, 64), "plan": (256, 64)}
"""Numbers of prompts for training and for evaluation."""
MOST_TOKENS = {"chat": 96, "plan": 64}


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    try:
        return _train(options)
    except (BadArtifact, OSError, ValueError) as error:
        print(f"cannot train heads: {error}", file=sys.stderr)
        return 1


def _train(options: argparse.Namespace) -> int:
    import torch

    from engine_agent.engines.medusa.capture import CaptureLimits, OutOfTime, capture
    from engine_agent.engines.medusa.heads import (
        MedusaHeads,
        TrainingRules,
        ranks_of,
        train,
        training_rows,
        vocabulary_of,
        write_heads,
    )

    began = time.monotonic()
    until_s = began + options.limit_s
    if options.threads:
        torch.set_num_threads(options.threads)
    digest = _digest(options.model)
    work = _work_folder(options, digest)
    model, tokenizer = _load(options)
    trained: list[Any] = []
    evaluated: dict[str, list[Any]] = {}
    try:
        for family in options.families:
            limits = CaptureLimits(options.batch, MOST_TOKENS[family], until_s)
            for count, held_out in zip(_counts(options, family), (False, True), strict=True):
                chosen = prompts(family, count, held_out=held_out)
                folder = work / f"{family}-{'evaluated' if held_out else 'trained'}"
                found = capture(model, tokenizer, chosen, folder, limits, _print_line)
                if held_out:
                    evaluated[family] = found
                else:
                    trained += found
        whole = model.lm_head.weight.shape[0]
        vocabulary = vocabulary_of(trained, options.vocabulary, whole).to(options.device)
        heads = MedusaHeads(options.heads, model.lm_head.weight.detach().float()[vocabulary], vocabulary)
        heads.to(options.device)
        states, wanted = training_rows(trained, options.heads, vocabulary.cpu(), whole)
        _print_line(f"training {options.heads} heads on {len(states)} positions of {len(trained)} answers")
        rules = TrainingRules(options.heads, options.epochs)
        train(
            heads,
            states,
            wanted,
            rules,
            work / f"heads-{options.heads}-{options.vocabulary}-{options.epochs}.pt",
            until_s,
            _print_line,
        )
    except OutOfTime as late:
        _print_line(f"the limit of {options.limit_s:g} s is reached: {late}; run it again to continue")
        return EXIT_OUT_OF_TIME
    calibration = {
        "format": 1,
        "model": digest,
        "heads": options.heads,
        "top_k": TOP_K,
        "tasks": [
            {"name": family, "answers": [ranks_of(heads, answer, TOP_K, whole) for answer in answers]}
            for family, answers in evaluated.items()
        ],
        "learnt_from": {"answers": len(trained), "tokens": len(states), "epochs": options.epochs},
    }
    folder, manifest = write_heads(heads, whole, calibration, options.name, options.output)
    _print_line(f"done in {time.monotonic() - began:.0f} s: {folder}")
    print(json.dumps({"uri": folder.resolve().as_uri(), "digest": manifest.digest}))
    return 0


def _digest(model: Path) -> str:
    if (model / MANIFEST_NAME).exists():
        return read_manifest(model).digest
    if not (model / "config.json").exists():
        raise BadArtifact(f"{model} has no config.json: name a folder with a model as transformers reads it")
    return describe_folder(model, {}).digest


def _work_folder(options: argparse.Namespace, digest: str) -> Path:
    """Returns the folder for intermediate files, with a note of what they belong to. Raises ValueError if they belong
    to something else."""
    work: Path = options.work or options.output / f".work-{options.name}"
    work.mkdir(parents=True, exist_ok=True)
    counts = {family: list(_counts(options, family)) for family in options.families}
    wanted = {"model": digest, "answers": counts, "batch": options.batch, "most_tokens": MOST_TOKENS}
    note = work / "of.json"
    if note.exists() and json.loads(note.read_text()) != wanted:
        raise ValueError(f"{work} belongs to another model or other options: choose another --work, or remove it")
    note.write_text(json.dumps(wanted))
    return work


def _load(options: argparse.Namespace) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model, local_files_only=True)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(
        options.model, local_files_only=True, dtype=getattr(torch, options.dtype)
    )
    model.eval().requires_grad_(False)
    return model.to(options.device), tokenizer


def _counts(options: argparse.Namespace, family: str) -> tuple[int, int]:
    trained, evaluated = ANSWERS[family]
    return max(1, round(trained * options.share)), max(2, round(evaluated * options.share))


def _print_line(line: str) -> None:
    print(line, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="engine_agent.engines.medusa", description=__doc__)
    trainer = parser.add_subparsers(required=True).add_parser("train", help="capture, train, evaluate, write")
    trainer.add_argument("--model", type=Path, required=True, help="folder of the model, as transformers reads it")
    trainer.add_argument("--output", type=Path, required=True, help="parent of the artifact's folder")
    trainer.add_argument("--name", default="medusa-heads", help="name of the artifact's folder, before its digest")
    trainer.add_argument("--work", type=Path, help="folder for intermediate files (next to the artifact)")
    trainer.add_argument(
        "--families", nargs="+", choices=FAMILIES, default=list(FAMILIES), help="families of prompts (all)"
    )
    trainer.add_argument("--share", type=float, default=1.0, help="share of the prompts, for a short trial (1)")
    trainer.add_argument("--heads", type=int, default=4, help="tokens predicted beyond the model's own (4)")
    trainer.add_argument("--vocabulary", type=int, default=2048, help="tokens that heads can predict (2048)")
    trainer.add_argument("--epochs", type=int, default=8)
    trainer.add_argument("--batch", type=int, default=32, help="prompts answered together (32)")
    trainer.add_argument("--device", default="cpu", help="cpu or cuda")
    trainer.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the model (float32)")
    trainer.add_argument("--threads", type=int, default=0, help="processor threads (torch's default)")
    trainer.add_argument(
        "--limit-s", type=float, default=86400.0, help="stop after so many seconds; a later run continues"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
