"""Options of a run beside its model: checkpoints, health figures, evaluation, memory. Frozen dataclasses; ``kcp.config`` reads them.

kcp's own callbacks stand in the file's ``callbacks`` like MindFormers' own::

    callbacks:
      - {type: KcpCheckpoint, save_steps: 100, keep_last: 3}
      - {type: KcpHealth, every_steps: 50}
"""

from __future__ import annotations

from dataclasses import dataclass

from kcp.config_fields import Section, nearest

CHECKPOINT, HEALTH, MEMORY, MONITOR = "KcpCheckpoint", "KcpHealth", "KcpMemory", "KcpMonitor"
TRAINER = "KcpTrainer"
OWN_CALLBACKS = (CHECKPOINT, HEALTH, MEMORY, MONITOR)


@dataclass(frozen=True)
class CheckpointOptions:
    """Callback ``KcpCheckpoint``: when checkpoints are written and how many stay.

    Attributes:
        save_steps: steps from one checkpoint to the next; 0: none are written.
        keep_last: the newest ones that stay; 0: all.
        save_at_end: also after the last step.
    """

    save_steps: int = 0
    keep_last: int = 3
    save_at_end: bool = True


@dataclass(frozen=True)
class HealthOptions:
    """Callback ``KcpHealth``: when the health of KDA layers and the balance of experts are measured.

    Attributes:
        every_steps: steps from one measurement to the next; 0: never.
    """

    every_steps: int = 0


@dataclass(frozen=True)
class MemoryOptions:
    """Callback ``KcpMemory``: whether a run that would not fit is refused before it starts (:mod:`kcp.memory`).

    Attributes:
        check: compare the estimate with the memory that is available.
        available_gib: GiB that this machine's workers may take together; 0: what the machine, or its control group, has left.
    """

    check: bool = True
    available_gib: float = 0.0


@dataclass(frozen=True)
class EvaluationOptions:
    """MindFormers' ``do_eval`` and ``eval_step_interval``.

    Attributes:
        every_steps: steps from one evaluation to the next; 0: none.
    """

    every_steps: int = 0


def callback_options(top: Section) -> tuple[CheckpointOptions, HealthOptions, MemoryOptions]:
    """Read kcp's entries of ``callbacks``; what is wrong goes to ``top.problems``."""
    entries = top.anything("callbacks", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        top.problems.add("callbacks", entries, "a list of mappings with a type is needed")
        return CheckpointOptions(), HealthOptions(), MemoryOptions()
    checkpoint, health, memory = CheckpointOptions(), HealthOptions(), MemoryOptions()
    for number, entry in enumerate(entries):
        section = Section(entry, f"callbacks[{number}]", top.problems)
        kind = section.anything("type", "")
        if kind == CHECKPOINT:
            checkpoint = CheckpointOptions(
                save_steps=section.integer("save_steps", 0, minimum=0),
                keep_last=section.integer("keep_last", checkpoint.keep_last, minimum=0),
                save_at_end=section.boolean("save_at_end", checkpoint.save_at_end),
            )
            section.refuse_unknown(())
        elif kind == HEALTH:
            health = HealthOptions(every_steps=section.integer("every_steps", 0, minimum=0))
            section.refuse_unknown(())
        elif kind == MEMORY:
            memory = MemoryOptions(check=section.boolean("check", True), available_gib=section.number("available_gib", 0.0, minimum=0.0))
            section.refuse_unknown(())
        elif kind not in OWN_CALLBACKS and (near := nearest(kind, OWN_CALLBACKS, cutoff=0.8)):
            section.problems.add(section.name("type"), kind, f"did you mean {near}?")
    return checkpoint, health, memory


def evaluation_options(top: Section) -> EvaluationOptions:
    """Read MindFormers' keys of an evaluation while training."""
    wanted = top.boolean("do_eval", False)
    interval = top.integer("eval_step_interval", 100)
    if not wanted:
        return EvaluationOptions()
    if not isinstance(top.anything("eval_dataset"), dict):
        top.problems.add("eval_dataset", top.anything("eval_dataset"), "a section like train_dataset is needed with do_eval")
    return EvaluationOptions(every_steps=interval)
