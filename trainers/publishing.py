"""Saves and publishes the model of a Trainer: with its code and card, and without the Trainer's arguments, which are a
pickle with this machine's paths."""

import shutil
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from huggingface_hub import HfApi
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_utils import HubStrategy
from transformers.utils.hub import PushInProgress

from ..core.errors import InputError, library_errors_at
from ..core.scratch import link
from .freezing import TrainerBase

_OF_A_TRAINING = ("optimizer*", "scheduler.pt", "scaler.pt", "rng_state*", "trainer_state.json", "global_step*")


class PublishingMixin(TrainerBase):
    """`push_to_hub`, and the pushes of `TrainingArguments(push_to_hub=True)`, publish an expanded model as
    `hf_moe_expand.push_to_hub` does. An adapter of PEFT is pushed as the library does."""

    push_in_progress: PushInProgress | None = None

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        (Path(output_dir or self.args.output_dir) / TRAINING_ARGS_NAME).unlink(missing_ok=True)

    def init_hf_repo(self, *args: Any, **kwargs: Any) -> None:
        if self._is_published and self.args.hub_strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
            raise InputError(
                f"hub_strategy is {self.args.hub_strategy.value!r}: the model is published, and not what resumes its "
                "training: take 'end' or 'every_save'."
            )
        with library_errors_at(self._repository, secrets=[self.args.hub_token]):
            super().init_hf_repo(*args, **kwargs)

    def push_to_hub(
        self, commit_message: str | None = "End of training", blocking: bool = True, token: str | None = None,
        revision: str | None = None, private: bool | None = None, **card: Any,
    ) -> Any:  # fmt: skip
        """Saves the model in `output_dir`, and publishes it: weights, code, tokenizer and card. Of the library's
        arguments for the card it takes `license`: the card states what config.json does.

        Returns:
            The `Push`; its future if it is not `blocking`; None on other ranks than the first.

        Raises:
            InputError: see `hf_moe_expand.push_to_hub`.
        """
        if not self._is_published:
            return super().push_to_hub(commit_message, blocking, token, revision, private, **card)
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        self._finish_current_push()
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        if left := [name for name in card if name != "license"]:
            print(f"push_to_hub: the card is made of config.json, without {', '.join(left)}")
        work = partial(
            self._publish, self.args.output_dir, commit_message, token, revision, private, card.get("license")
        )
        if blocking:
            return work()
        future = HfApi().run_as_future(work)
        self.push_in_progress = PushInProgress([future])  # type: ignore[arg-type]  # a list, as the library gives it
        return future

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if not self._is_published:
            super()._push_from_checkpoint(checkpoint_folder)
            return
        busy = self.push_in_progress is not None and not self.push_in_progress.is_done()
        if not self.is_world_process_zero() or self.args.hub_strategy == HubStrategy.END:
            return
        if busy and not self.args.hub_always_push:
            return
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        # A copy, since the training may remove the checkpoint before it is published.
        place, step = Path(mkdtemp(prefix="_push-", dir=self.args.output_dir)), self.state.global_step
        skipped = shutil.ignore_patterns(*_OF_A_TRAINING)
        shutil.copytree(checkpoint_folder, place, ignore=skipped, copy_function=link, dirs_exist_ok=True)

        def work() -> None:
            try:
                self._publish(place, f"Training in progress, step {step}")
            except InputError as error:
                print(f"warning: step {step} was not published: {error}")
            finally:
                shutil.rmtree(place, ignore_errors=True)

        jobs: Any = self.push_in_progress.jobs if busy and self.push_in_progress else []
        self.push_in_progress = PushInProgress([*jobs, HfApi().run_as_future(work)])  # type: ignore[arg-type]

    @property
    def _is_published(self) -> bool:
        """Whether the model is an expanded one, without an adapter, which would be saved alone."""
        model = self.accelerator.unwrap_model(self.model)
        return hasattr(model, "expanded_ffns") and not getattr(model, "peft_config", None)

    @property
    def _repository(self) -> str:
        return (
            getattr(self, "hub_model_id", None) or self.args.hub_model_id or Path(self.args.output_dir).absolute().name
        )

    def _publish(
        self, folder: str | Path, message: str | None, token: str | None = None, revision: str | None = None,
        private: bool | None = None, license: str | None = None,
    ) -> Any:  # fmt: skip
        from .. import push_to_hub

        return push_to_hub(
            folder, self._repository, commit_message=message, license=license,
            private=bool(self.args.hub_private_repo if private is None else private),
            revision=revision or self.args.hub_revision, token=token or self.args.hub_token,
        )  # fmt: skip
