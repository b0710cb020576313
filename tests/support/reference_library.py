"""The reference library: transformers, made importable beside a CPU build of torch. Nothing is downloaded.

``from tests.support.reference_library import transformers``. Its video processors want torchvision, whose
wheel is built for CUDA: the two operators that it fails to register without one are declared here, before it
is imported. No test calls them.
"""

from __future__ import annotations

import torch

_OPERATORS = torch.library.Library("torchvision", "FRAGMENT")
for _name in ("nms", "qnms"):
    if not hasattr(torch.ops.torchvision, _name):
        _OPERATORS.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import torchvision  # noqa: E402
import transformers  # noqa: E402

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

__all__ = ["torchvision", "transformers"]
