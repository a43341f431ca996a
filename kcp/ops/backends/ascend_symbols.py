"""Hyper-Parallel's symbols: each is looked up by itself on its first use, and called by the arguments that it really takes.

Versions differ in the order of arguments and in which optional ones there are, so nothing is passed by position unless a symbol can't be
inspected. What a symbol does not take is left out where it has the document's default, and refused otherwise.
"""

import ast
import importlib
import inspect
from collections.abc import Callable
from functools import lru_cache

PACKAGE = "hyper_parallel.custom_ops.experimental"
BRINGS = "Hyper-Parallel of branch kda_r1.0 (a26a38dd or later) built with FLA-NPU 70eb6ba8 or later brings it; it is not on PyPI"

# Sections 4 and 5 of the Hyper-Parallel document: arguments in order with their defaults, "*" begins those passed by keyword.
DOCUMENT = {
    "chunk_kda": "q k v g beta scale chunk_size=64 * layout='BNSD' output_final_state=False safe_gate=False lower_bound=-5.0 "
    "use_gate_in_kernel=True a_log=None dt_bias=None cu_seqlens=None chunk_indices=None initial_state=None disable_recompute=True "
    "state_v_first=False epsilon=1e-6 use_qk_l2norm_in_kernel=False use_beta_sigmoid_in_kernel=False allow_neg_eigval=False use_exp2=True",
    "fwd_prepare": "q k v g beta scale chunk_size=64 * layout='BNSD' a_log=None dt_bias=None cu_seqlens=None chunk_indices=None "
    "epsilon=1e-6 use_qk_l2norm_in_kernel=False use_gate_in_kernel=False use_beta_sigmoid_in_kernel=False allow_neg_eigval=False "
    "safe_gate=False lower_bound=-5.0 use_exp2=True backward_mode='save'",
    "pre_process_fwd": "k w u * gk cu_seqlens chunk_size=64",
    "fwd_h": "k w u * gk initial_state=None output_final_state=False chunk_size=64 cu_seqlens=None chunk_indices=None use_exp2=True "
    "state_v_first=False",
    "fwd_finalize": "qg_scaled aqk v_new h * output_layout='BSND' state_v_first=False cu_seqlens=None chunk_indices=None",
    "bwd_prepare": "aqk v_new d_o h * scale layout='BNSD' chunk_size=64 state_v_first=False cu_seqlens=None chunk_indices=None",
    "pre_process_bwd": "q k w d_o dv scale chunk_size=64 * gk cu_seqlens=None",
    "bwd_dhu": "q k w d_o dv scale chunk_size=64 * gk h0=None dht=None cu_seqlens=None chunk_indices=None use_exp2=True "
    "state_v_first=False",
    "bwd_finalize": "q k v gk raw_g beta a_log dt_bias akk v_new h dh dv_scan d_aqk dq_raw * scale lower_bound=-5.0 chunk_size=64 "
    "safe_gate=True use_gate_in_kernel=True use_exp2=True state_v_first=False q_rstd=None k_rstd=None cu_seqlens=None "
    "chunk_indices=None use_beta_sigmoid_in_kernel=False allow_neg_eigval=False output_layout='BNSD'",
    "merge_fwd_bwd": "state summaries pre_or_post_num_ranks rank * forward=True state_v_first=False",
}
_OTHER_SPELLINGS = {"A_log": "a_log", "gK": "gk", "do": "d_o", "Aqk": "aqk", "Akk": "akk", "dAqk": "d_aqk"}
_REQUIRED = object()


class Refused(Exception):
    """A kernel can't serve this call; the text is the exact limit."""


def name_of(stage: str) -> str:
    """``npu_chunk_kda_fwd_h`` of ``fwd_h``."""
    return "npu_chunk_kda" if stage == "chunk_kda" else f"npu_chunk_kda_{stage}"


def _document(stage: str) -> tuple[list[str], dict]:
    """``(arguments passed by position, default of every argument)``."""
    positional, keyword = DOCUMENT[stage].split("*")
    defaults = {}
    for word in (positional + keyword).split():
        name, _, default = word.partition("=")
        defaults[name] = ast.literal_eval(default) if default else _REQUIRED
    return [word.partition("=")[0] for word in positional.split()], defaults


class Symbol:
    """One function of Hyper-Parallel.

    Args:
        stage: which stage it serves.
        function: the function.

    Raises:
        Refused: its signature is not one that kcp can call.
    """

    def __init__(self, stage: str, function: Callable):
        self.stage = stage
        self.name = name_of(stage)
        self.function = function
        self.by_position, self.defaults = _document(stage)
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):
            parameters = None  # nothing to inspect: the document's order
        self.accepts: dict[str, inspect.Parameter] | None = None
        self.takes_any = False
        if parameters is not None and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
            self.takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
            self.accepts = {_OTHER_SPELLINGS.get(p.name, p.name): p for p in parameters if p.kind is not p.VAR_KEYWORD}
            self._check()

    def _check(self) -> None:
        unknown = [n for n, p in self.accepts.items() if p.default is p.empty and n not in self.defaults]
        missing = [n for n, default in self.defaults.items() if default is _REQUIRED and not self.takes(n)]
        if unknown or missing:
            says = [f"requires {', '.join(unknown)}, which kcp does not know"] if unknown else []
            says += [f"takes no {', '.join(missing)}"] if missing else []
            raise Refused(f"{self.name} of the installed version {' and '.join(says)}; {BRINGS}")

    def takes(self, argument: str) -> bool:
        """Whether the installed version has this argument."""
        return self.accepts is None or self.takes_any or argument in self.accepts

    def __call__(self, **values):
        """Call the function with the document's argument names.

        Raises:
            Refused: the installed version lacks an argument, and its value is not the document's default.
        """
        for name in [n for n in values if not self.takes(n)]:
            value, default = values.pop(name), self.defaults[name]
            if value is not None and not (isinstance(value, (bool, int, float, str)) and value == default):
                raise Refused(f"{self.name} of the installed version takes no {name}; allowed: {default!r}")
        if self.accepts is None:
            positional = [values.pop(n) for n in self.by_position]
            return self.function(*positional, **values)
        positional = [values.pop(n) for n, p in self.accepts.items() if p.kind is p.POSITIONAL_ONLY]
        named = {self.accepts[n].name if n in self.accepts else n: value for n, value in values.items()}
        return self.function(*positional, **named)


@lru_cache(None)
def _package():
    """Hyper-Parallel's module, or why it can't be imported."""
    try:
        return importlib.import_module(PACKAGE)
    except ModuleNotFoundError as error:
        if error.name and PACKAGE.startswith(error.name):
            return f"{error.name} is not installed; {BRINGS}"
        return f"{PACKAGE} can't be imported ({error})"
    except Exception as error:  # a broken build of a package with C++ parts can raise anything
        return f"{PACKAGE} can't be imported ({type(error).__name__}: {' '.join(str(error).split())[:200]})"


@lru_cache(None)
def find(stage: str) -> Symbol | str:
    """The symbol of a stage (``"chunk_kda"``: the differentiable op), or why there is none."""
    package = _package()
    if isinstance(package, str):
        return package
    function = getattr(package, name_of(stage), None)
    if function is None:
        return f"{PACKAGE} has no {name_of(stage)}; {BRINGS}"
    try:
        return Symbol(stage, function)
    except Refused as error:
        return str(error)


def version() -> str | None:
    """Version of the installed Hyper-Parallel, None where there is none."""
    package = _package()
    if isinstance(package, str):
        return None
    return str(getattr(importlib.import_module("hyper_parallel"), "__version__", "of unknown version"))


def forget() -> None:
    """Look everything up again (after Hyper-Parallel was installed or replaced)."""
    _package.cache_clear()
    find.cache_clear()
