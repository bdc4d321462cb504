"""Commands, options and help. Nothing is imported here that takes time.

The parsed options have `run`, the name of the command's function in `commands.py`.
"""

import argparse
import sys
from typing import Any, NoReturn

from elementgrad import __version__
from elementgrad.errors import shortened

FRAMEWORKS = ("torch", "tensorflow", "jax")
DTYPES = ("float64", "float32", "float16", "bfloat16")
CODES = """exit codes:
  0  nothing to report
  1  a finding: no path, a gradient of zero, numbers that are not finite, or a difference
  2  the command cannot work as it was given
  3  your own code raised; its traceback is shown"""
MODEL = """file.py:name or package.module:name, of a model or a function. A class, and a function that takes no
arguments, are called first, and what they return is used; 'file.py:name()' calls any other function, too"""
INPUTS = """arguments in order: a .npy, .npz, .safetensors or .json file, JSON such as '[1.0, 2.0]', or file.py:name;
'data.npz:x' takes one array of a file"""


class SingleValue(argparse.Action):
    """An option that may be given once; argparse would let a second value replace the first."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, *_: Any) -> None:
        if getattr(namespace, self.dest) is not None:
            parser.error(f"{self.option_strings[0]} is given twice; give it once")
        setattr(namespace, self.dest, values)


class InterspersedParser(argparse.ArgumentParser):
    """A parser that takes options between arguments too, and says in one line what does not parse."""

    _is_intermixed = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        # `parse_known_intermixed_args` calls this method for each of its two rounds, and knows no subcommands.
        if self._is_intermixed or any(action.nargs == argparse.PARSER for action in self._actions):
            return super().parse_known_args(args, namespace)
        self._is_intermixed = True
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._is_intermixed = False

    def _print_message(self, message: str, file: Any = None) -> None:
        # The base ignores an output that is closed or full, and the command would end with 0.
        if message:
            (file or sys.stderr).write(message)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"elementgrad: {shortened(message)}; '{self.prog} --help' has the options\n")


def make_parser() -> argparse.ArgumentParser:
    parser = InterspersedParser(
        prog="elementgrad",
        description="Gradients, one element at a time: read, explain, edit and train single elements of any tensor.",
        epilog="'elementgrad COMMAND --help' has the options and examples of a command.\n\n" + CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"elementgrad {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    _add_tour(commands)
    _add_grad(commands)
    _add_explain(commands)
    _add_check(commands)
    _add_audit(commands)
    _add_names(commands)
    _add_replay(commands)
    _add_report(commands)
    _add_explore(commands)
    _add_patch(commands)
    _add_completion(commands)
    return parser


def _add_tour(commands: Any) -> None:
    tour = _add_command(
        commands,
        "tour",
        "answer the founding questions on two small models, and write them to a page",
        """examples:
  elementgrad tour
  elementgrad tour --framework jax --out tour-jax.html""",
    )
    tour.add_argument("--framework", choices=FRAMEWORKS, default="torch", help="torch by default")
    tour.add_argument("--out", metavar="FILE", default="tour.html", help="the page; tour.html by default")
    tour.add_argument("--no-report", action="store_true", help="write no page")
    tour.add_argument("--debug", action="store_true", help="show the whole traceback of an error")


def _add_grad(commands: Any) -> None:
    grad = _add_command(
        commands,
        "grad",
        "derivatives of named elements by named elements",
        """examples:
  elementgrad grad net.py:net x.npy --of 'head[0, 3]' --wrt 'conv1[0, 12]'
  elementgrad grad loss.py:loss '[1.0, 2.0, 3.0]' --wrt 'x[2]'
  elementgrad grad net.py:make x.npy --of 'output[0, 3]' --wrt x --out g.npy --plot g.png
  elementgrad grad net.py:net --input x=x.npy --input mask=mask.npy --of 'output[0]' --wrt x --wrt fc.weight --json

The numbers go to stdout, everything else to stderr.""",
    )
    _add_target(grad)
    _add_places(grad, several=True)
    grad.add_argument(
        "--unconnected", choices=("error", "zero"), default="error", help="what to do where there is no path"
    )
    grad.add_argument(
        "--budget", metavar="BYTES", type=_read_budget, help="memory for sweeps run at once, such as 200MB"
    )
    grad.add_argument("--out", metavar="FILE", help="write the gradient to a .npy, .npz, .safetensors or .json file")
    grad.add_argument("--plot", metavar="FILE", help="draw the gradient into a .png, .svg or .pdf file")
    _add_output_options(grad)


def _add_explain(commands: Any) -> None:
    explain = _add_command(
        commands,
        "explain",
        "why a gradient is None, zero, NaN or wrong",
        """examples:
  elementgrad explain net.py:net x.npy --of 'output[0, 3]' --wrt 'embedding.weight[7, 0]'
  elementgrad explain loss.py:loss '[1.0, -2.0]' --wrt 'x[1]'
  elementgrad explain train.py:step --step

Exit code 0 says that the gradient flows.""",
    )
    _add_target(explain)
    _add_places(explain)
    explain.add_argument("--no-probe", action="store_true", help="try nothing out by moving an element")
    explain.add_argument(
        "--step", action="store_true", help="the function is a training step that takes nothing: run it as it is"
    )
    _add_output_options(explain)


def _add_check(commands: Any) -> None:
    check = _add_command(
        commands,
        "check",
        "compare derivatives with differences of values",
        """examples:
  elementgrad check loss.py:loss '[0.5, 1.0]'
  elementgrad check net.py:net x.npy --of 'output[0, 3]' --wrt 'fc.weight[3, :5]'

Exit code 0 says that all entries agree; 1 that some differ, or that differences do not decide.""",
    )
    _add_target(check)
    _add_places(check)
    _add_output_options(check)


def _add_audit(commands: Any) -> None:
    audit = _add_command(
        commands,
        "audit",
        "which parameters of a model do not learn, and why",
        """examples:
  elementgrad audit net.py:net x.npy --loss net.py:loss
  elementgrad audit net.py:net --loss train.py:loss_of_model --except 'pooler.*'
  elementgrad audit train.py:net --loss train.py:step
  elementgrad audit net.py:net_with_loss ids.npy --json

LOSS takes what the model returns for the inputs. Without inputs, or if its first parameter is called model, it takes
the model, and then the inputs; a loss that takes nothing is a training step. Without --loss the model itself returns
the loss, or something with a .loss.

Exit code 0 says that every parameter learns.""",
    )
    _add_target(audit)
    audit.add_argument("--loss", metavar="LOSS", action=SingleValue, help="file.py:name of a function, or of a step")
    audit.add_argument(
        "--except",
        metavar="NAME",
        action="append",
        default=[],
        dest="except_",
        help="a parameter or module that need not learn, such as 'pooler.*'; may be given several times",
    )
    _add_output_options(audit)


def _add_names(commands: Any) -> None:
    names = _add_command(
        commands,
        "names",
        "every tensor that --of and --wrt can name",
        """examples:
  elementgrad names net.py:net x.npy
  elementgrad names net.py:net x.npy --kind given
  elementgrad names net.py:net --match 'encoder.*.weight'""",
    )
    _add_target(names)
    kinds = ("input", "activation", "given", "output", "parameter", "buffer")
    names.add_argument("--kind", choices=kinds, help="only these")
    names.add_argument("--match", help="only names that match: * within a component, ** across them")
    _add_output_options(names)


def _add_replay(commands: Any) -> None:
    replay = _add_command(
        commands,
        "replay",
        "run the step again that eg.watch captured, and say what is wrong in it",
        """examples:
  elementgrad replay nan.capture train.py:model
  elementgrad replay nan.capture train.py:make_model --loss train.py:loss

Nothing in the capture is executed. A capture of another model is refused.""",
    )
    replay.add_argument("capture", metavar="CAPTURE", help="the file that eg.watch wrote")
    replay.add_argument("model", metavar="MODEL", help=" ".join(MODEL.split()))
    replay.add_argument("--loss", metavar="LOSS", help="file.py:name of a function of the output, to be followed too")
    _add_output_options(replay)


def _add_report(commands: Any) -> None:
    report = _add_command(
        commands,
        "report",
        "one HTML file with the gradient, its pictures, plan and diagnosis",
        """examples:
  elementgrad report net.py:net x.npy --of 'head[0, 3]' --wrt x --out report.html
  elementgrad report patch.safetensors --out patch.html

Give the file of a patch instead of MODEL for a page about what was trained.""",
    )
    _add_target(report)
    _add_places(report, several=True)
    report.add_argument(
        "--budget", metavar="BYTES", type=_read_budget, help="memory for sweeps run at once, such as 200MB"
    )
    report.add_argument("--out", metavar="FILE", default="report.html", help="report.html by default")
    report.add_argument("--title", help="the title of the page")
    _add_output_options(report)


def _add_explore(commands: Any) -> None:
    explore = _add_command(
        commands,
        "explore",
        "a page on which to click an element and see what drives it",
        """examples:
  elementgrad explore net.py:net x.npy
  elementgrad explore net.py:net --input net.py:image --no-browser

The page is served on this machine alone until Ctrl-C. Its address goes to stdout, with a token that opens it.""",
    )
    _add_target(explore)
    explore.add_argument("--no-browser", action="store_true", help="open no browser")
    explore.add_argument("--debug", action="store_true", help="show the whole traceback of an error")


def _add_patch(commands: Any) -> None:
    patch = commands.add_parser(
        "patch", help="make a patch of two checkpoints, look into it, put it into weights, take it back"
    )
    actions = patch.add_subparsers(dest="action", required=True, metavar="action")
    inspect = _add_command(
        actions,
        "inspect",
        "what a patch changes",
        """examples:
  elementgrad patch inspect patch.safetensors
  elementgrad patch inspect patch.safetensors checkpoint/

With WEIGHTS, exit code 1 says that the patch was not made for them.""",
        run="inspect_patch",
    )
    inspect.add_argument("patch", metavar="PATCH", help="the file of a patch")
    inspect.add_argument("target", metavar="WEIGHTS", nargs="?", help="say whether it fits this file or folder")
    _add_output_options(inspect)
    diff = _add_command(
        actions,
        "diff",
        "the patch that turns one checkpoint into another",
        """examples:
  elementgrad patch diff base/ tuned/ --out patch.safetensors
  elementgrad patch diff base.safetensors tuned.npz --out patch.safetensors --no-originals

Weights are compared by bits, one tensor at a time.""",
        run="diff_patch",
    )
    diff.add_argument("before", metavar="BEFORE", help="a .safetensors or .npz file, or a folder with shards")
    diff.add_argument("after", metavar="AFTER", help="the same tensors, as a file or folder")
    diff.add_argument("--out", metavar="FILE", required=True, help="the file of the patch")
    diff.add_argument("--only-common", action="store_true", help="leave out tensors that only one of them has")
    diff.add_argument(
        "--no-originals", action="store_true", help="keep a checksum of the values before, not the values"
    )
    diff.add_argument("--compress", action="store_true", help="compress the file, which needs zstandard")
    _add_output_options(diff)
    for name, summary, example in (
        (
            "apply",
            "put the values of a patch into weights",
            "model.safetensors patch.safetensors --out new.safetensors",
        ),
        ("undo", "take a patch back, to the bit", "new.safetensors patch.safetensors --out old.safetensors"),
    ):
        action = _add_command(
            actions,
            name,
            summary,
            f"""examples:
  elementgrad patch {name} {example}
  elementgrad patch {name} checkpoint/ patch.safetensors
  elementgrad patch {name} net.py:net patch.safetensors --out weights.npz

Without --out the file or folder itself is changed, as a whole or not at all.
Weights that the patch was not made for are refused, and no file is written.""",
            run="patch_weights",
        )
        action.set_defaults(undo=name == "undo")
        action.add_argument(
            "target",
            metavar="WEIGHTS",
            help="a .safetensors or .npz file, the folder of a checkpoint, or file.py:name of a model",
        )
        action.add_argument(
            "patch", metavar="PATCH", nargs="+", help="the file of a patch, or several that belong together"
        )
        action.add_argument(
            "--out",
            metavar="FILE",
            help="where all the weights go: a new folder, .safetensors or .npz, for a Keras model also .weights.h5 or "
            ".keras",
        )
        action.add_argument(
            "--link", action="store_true", help="link the shards that do not change, instead of copying"
        )
        _add_output_options(action)


def _add_completion(commands: Any) -> None:
    completion = _add_command(
        commands,
        "completion",
        "a script for tab completion in a shell",
        """examples:
  eval "$(elementgrad completion bash)"                 # this shell; in ~/.bashrc for all
  elementgrad completion zsh > ~/.zfunc/_elementgrad    # a folder that is in $fpath
  elementgrad completion fish > ~/.config/fish/completions/elementgrad.fish""",
    )
    completion.add_argument("shell", choices=("bash", "zsh", "fish"))
    completion.add_argument("--debug", action="store_true", help=argparse.SUPPRESS)


def _add_command(commands: Any, name: str, summary: str, epilog: str, run: str = "") -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(run=run or name)
    return command


def _add_target(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", metavar="MODEL", help=" ".join(MODEL.split()))
    command.add_argument("inputs", metavar="INPUT", nargs="*", help=" ".join(INPUTS.split()))
    command.add_argument(
        "--input", metavar="NAME=INPUT", action="append", default=[], dest="named", help="an argument by its name"
    )
    command.add_argument("--framework", choices=FRAMEWORKS, help="the framework of the inputs, if it is not known")
    command.add_argument("--dtype", choices=DTYPES, help="the dtype of floating inputs; that of the model by default")


def _add_places(command: argparse.ArgumentParser, several: bool = False) -> None:
    command.add_argument(
        "--of", metavar="PLACE", action=SingleValue, help="what to differentiate, such as 'head[0, 3]'"
    )
    text = "with respect to what, such as 'conv1[0, 12, 5:9]'" + ("; may be given several times" if several else "")
    command.add_argument("--wrt", metavar="PLACE", action="append" if several else SingleValue, help=text)


def _read_budget(text: str) -> int | str:
    return int(text) if text.isascii() and text.isdecimal() else text


def _add_output_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    command.add_argument("--debug", action="store_true", help="show the whole traceback of an error")
