"""``rllm-core export-model``: exports a trained model for transformers, PEFT and vLLM."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command("export-model", short_help="Export a trained model or its adapters for transformers, PEFT and vLLM.")
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@click.argument("folder", metavar="FOLDER", type=click.Path(path_type=Path))
@click.option("--step", type=click.IntRange(min=0), help="Step of the checkpoint. Defaults to the latest complete one.")
@click.option("--merge", is_flag=True, help="Merge adapters into their base model, which needs peft.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def export_model(context: click.Context, run: Path, folder: Path, step: int | None, merge: bool, as_json: bool) -> None:
    """Export a trained model or its adapters for transformers, PEFT and vLLM.

    RUN is a run folder; the backend of the run writes the model of a checkpoint. FOLDER must be new or empty, and
    appears once the export is complete. It contains the tokenizer with its chat template, a model card, and the
    weights of the model, or adapters if the run trained adapters.
    """
    from rllm_viewer.exporting import export

    found = export(run, folder, context.obj.plugins, step=step, merge=merge)
    if as_json:
        click.echo(json.dumps(found))
        return
    kind = "model" if found["base_model"] is None else f"PEFT adapters of {found['base_model']}"
    click.echo(f"step {found['step']} (weight version {found['weight_version']}) of {found['run']}: {kind}")
    click.echo("to load it, after import transformers:")
    for line in found["load"]:
        click.echo(f"  {line}")
    click.echo(f"model: {found['folder']}")
