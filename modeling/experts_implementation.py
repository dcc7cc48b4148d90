"""`experts_implementation`, the switch by which transformers chooses how a mixture's experts run."""

from typing import Any

from .dispatch import IMPLEMENTATIONS


class ExpertsImplementationMixin:
    """Takes `experts_implementation` in `from_pretrained`, in the configuration and in `set_experts_implementation`.

    `"eager"` runs each expert as a module, `"grouped_mm"` and `"batched_mm"` run all together, and None, the default,
    takes the fastest for the number of tokens.
    """

    config: Any

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True  # the library looks for a decorator in the source of the class

    def get_correct_experts_implementation(self, requested_experts: str | None) -> Any:
        """The implementation to use for a request.

        Raises:
            ValueError: the name is unknown.
        """
        if requested_experts is not None and requested_experts not in IMPLEMENTATIONS:
            raise ValueError(
                f"experts_implementation is {requested_experts!r}; known: {', '.join(IMPLEMENTATIONS)}; leave it out "
                "for the fastest."
            )
        if hasattr(self, "routing_control"):
            return requested_experts
        # The backbone's inner model is built next from the same configuration. It is dense, and takes only this one.
        self._requested_experts = requested_experts
        return "eager"

    def _use_requested_experts(self, has_mixtures: bool) -> None:
        """Sets the request once the model is built; the backbone's own mixtures, if it has any, need a name."""
        requested = vars(self).pop("_requested_experts", None)
        self.config._experts_implementation_internal = "grouped_mm" if requested is None and has_mixtures else requested
