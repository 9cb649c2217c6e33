"""Names that settings have in TRL, transformers, Axolotl, vLLM and others, for people who come from
there.

`config/refusals.py` uses them in the message for an unknown key, which
`tests/unit/config/test_config.py` tests by examples."""

FOREIGN = {
    "adapter": ("trainer.lora.r",),
    "alpha": ("trainer.lora.lora_alpha",),
    "batch_size": ("trainer.per_device_train_batch_size",),
    "bf16": ("trainer.dtype",),
    "cutoff_len": ("sft.max_length", "preference.max_length"),
    "data_files": ("data.source",),
    "dataset": ("data.source",),
    "dataset_name": ("data.source",),
    "dataset_path": ("data.source",),
    "eval_size": ("data.sft_eval", "data.eval"),
    "file": ("data.source",),
    "files": ("data.source",),
    "fp16": ("trainer.dtype",),
    "kl_coef": ("update.algorithm.beta",),
    "load_in_4bit": ("trainer.lora.r",),
    "lora_r": ("trainer.lora.r",),
    "lora_rank": ("trainer.lora.r",),
    "lr": ("sft.learning_rate", "update.learning_rate", "preference.learning_rate"),
    "max_completion_length": ("rollout.max_tokens",),
    "max_new_tokens": ("rollout.max_tokens", "evaluate.max_tokens"),
    "max_seq_len": ("sft.max_length", "preference.max_length"),
    "max_seq_length": ("sft.max_length", "preference.max_length"),
    "micro_batch_size": ("trainer.per_device_train_batch_size",),
    "model_id": ("base_model",),
    "model_name": ("base_model",),
    "model_name_or_path": ("base_model",),
    "n_epochs": ("sft.epochs", "preference.epochs"),
    "name": ("base_model",),
    "num_epochs": ("sft.epochs", "preference.epochs"),
    "num_generations": ("rollout.n",),
    "num_train_epochs": ("sft.epochs", "preference.epochs"),
    "path": ("data.source",),
    "peft": ("trainer.lora.r",),
    "rank": ("trainer.lora.r",),
    "reward_fn": ("data.rewards",),
    "reward_func": ("data.rewards",),
    "reward_funcs": ("data.rewards",),
    "steps": ("sft.max_steps", "preference.max_steps"),
    "test_size": ("data.sft_eval", "data.eval"),
    "torch_dtype": ("trainer.dtype",),
    "train_batch_size": ("trainer.per_device_train_batch_size",),
    "train_file": ("data.source",),
    "use_lora": ("trainer.lora.r",),
    "use_peft": ("trainer.lora.r",),
    "val_size": ("data.sft_eval", "data.eval"),
}
"""Name → the whole keys of the settings here that do the same. A message names those that the
pipeline has."""
OPTIONS = {
    "output_dir": "is an option: --store DIRECTORY, in which each run has a folder of its name",
    "report_to": "is no setting: TUNELOOP_TRACKERS names trackers (docs/tracking.md)",
    "resume_from_checkpoint": "is a command: `tuneloop resume RUN`",
    "run_name": "is an option: --run NAME",
    "store": "is an option: --store DIRECTORY",
}
"""Name → what does the same and is no setting. It is compared with the whole key, so only outside
of sections."""
SECTIONS = {"data": ("file", "files", "path"), "model": ("name",)}
"""Section → names of `FOREIGN` that are looked up only for an unknown key of this section."""


def list_equivalents(setting: str) -> tuple[str, ...]:
    """Return the settings that do what `setting`, which is none of ours, does in other tools."""
    section, _, name = setting.rpartition(".")
    for owner, names in SECTIONS.items():
        if name in names and section != owner:
            return ()
    return FOREIGN.get(name, ())
