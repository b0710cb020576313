"""Parts of the model that training options name, and how they are frozen.

A part is an encoder without its projector, such a projector, or the LLM. A frozen parameter asks for no
gradient, and all else follows: a part whose input needs none either keeps nothing for a backward and has
none (a frozen encoder, then the exchange of its rows), one between trained parts passes gradients on
without making any of its own weights, and neither FSDP nor the optimizer holds anything for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from torch import nn


def split_projector(
    name: str, module: nn.Module, *, projector: Collection[str]
) -> dict[str, list[nn.Parameter]]:
    """Return the parameters of an encoder by part: ``name``, and ``name_projector`` if it has one.

    Args:
        name: Of the encoder.
        module: The encoder.
        projector: Names of its children that turn its output into rows of the LLM.
    """
    parts: dict[str, list[nn.Parameter]] = {name: []}
    for path, parameter in module.named_parameters():
        part = f"{name}_projector" if path.partition(".")[0] in projector else name
        parts.setdefault(part, []).append(parameter)
    return parts


def freeze(parts: Mapping[str, Iterable[nn.Parameter]], names: Collection[str]) -> None:
    """Let the parameters of the parts in ``names`` ask for no gradient; before they are sharded."""
    for name, parameters in parts.items():
        for parameter in parameters:
            parameter.requires_grad_(name not in names)


def is_frozen(module: nn.Module) -> bool:
    """Return whether no parameter of ``module`` is trained."""
    return not any(parameter.requires_grad for parameter in module.parameters())
