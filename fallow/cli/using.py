"""Commands that use what a run has learnt: export, predict."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fallow.cli.app import BestRound, Force, Trust, app, console


@app.command()
def export(
    run: Annotated[str, typer.Argument(metavar="RUN")],
    out: Annotated[str | None, typer.Option("--out", "-o", help="Folder for it (default: RUN/export).")] = None,
    format: Annotated[str, typer.Option(help="safetensors, torch-export, onnx, or all that can be had.")] = "all",
    best: BestRound = False,
    force: Force = False,
    trust: Trust = False,
) -> None:
    """Write the trained model with a model card.

    Weights, and graphs that need no Fallow.
    """
    from fallow.export import export

    done = export(run, out, format, force, trust=trust, best=best)
    for sentence in done.left_out:
        console.say(sentence)
    console.say(f"written: {done.path}/ ({', '.join(done.files)})")


@app.command()
def predict(
    run: Annotated[str, typer.Argument(metavar="RUN")],
    folder: Annotated[str, typer.Argument(metavar="IMAGES", help="A folder of images, in folders or not; or one image.")],
    out: Annotated[str, typer.Option("--out", "-o", help="The CSV.")] = "predictions.csv",
    probabilities: Annotated[bool, typer.Option("--probabilities", help="A column per class as well.")] = False,
    batch: Annotated[int | None, typer.Option(help="Images per batch (default: the run's eval_batch).")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:N or auto.")] = "auto",
    best: BestRound = False,
    force: Force = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
    trust: Trust = False,
) -> None:
    """Label images with a run's model.

    Of a folder a CSV is written; of one image the classes are printed, the likeliest first.
    """
    from fallow.export.predict import predict
    from fallow.progress import Files

    if not Path(folder).is_dir() and Path(folder).suffix:
        from fallow.export.labelling import told

        console.rows(told(folder, run, device, trust, best))
        return
    with Files(console, quiet) as tell:
        done = predict(run, folder, out, probabilities=probabilities, batch=batch, device=device, tell=tell, force=force, trust=trust, best=best)
    if done.by_batch:
        console.say("batch norm used each batch's own statistics, as in the run: predictions depend on which images share a batch")
    if done.unreadable:
        console.say(f"{len(done.unreadable)} of {done.images} files could not be read; the column error says why ({done.unreadable[0]} is the first)")
    console.say(f"labelled {done.images - len(done.unreadable)} images: {done.path}")
