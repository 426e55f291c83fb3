import typer

app = typer.Typer(help='(being written)')


@app.command('list')
def list_suites() -> None:
    """(being written)"""
