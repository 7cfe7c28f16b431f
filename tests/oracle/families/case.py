"""The description of a fixture: the keys of its config.json, the class that computes its outputs, and the layout of
its files.

Invariant: the settings of the reference are read from the same config.json that is written; nothing else describes
the model, except `settings` if the class belongs to another family.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import PreTrainedModel

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures" / "families"
MARGIN = 0.01
NOTICED = 2e-3  # twice the tolerance of tests/it/oracle.rs
N_ANSWER = 16
BOS, EOS, MASK = 1, 2, 4
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
FIRST_WORD = 8  # lower ids are special, in the shared tokenizer or in the family

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Layout:
    """How a family's files contain the weights of the reference."""

    reshape: Callable[[Tensors, dict], Tensors] | None = None  # fuses tensors
    names: tuple[tuple[str, str], ...] = ()  # then replaces these patterns in all names, in order
    copies: tuple[tuple[str, str], ...] = ()  # a tensor, and the name of its copy in the files
    extra: Callable[[dict], Tensors] | None = None  # unused tensors of the files


@dataclass(frozen=True)
class Case:
    """A checkpoint to make. `config` is config.json, with the family's own keys, without the data type."""

    name: str
    model: type  # the class that computes the outputs, of transformers or of `invented`
    config: dict
    kind: str = "decoder"  # or "encoder", "encoder-decoder"
    blocks: str = ""  # the tested features, for README.md
    note: str = ""  # the source of the blocks, if the class belongs to another family
    settings: Callable[[dict], dict] | None = None  # config.json with the keys of a borrowed class
    patch: Callable[[torch.nn.Module, dict], None] | None = None  # changes the borrowed class
    layout: Layout = Layout()
    # Weights as they are stored, by name, if not all are in the data type.
    rounded: Callable[[str, torch.Tensor], torch.Tensor] | None = None
    dtype: torch.dtype = F32
    dtype_key: str | None = "torch_dtype"
    std: float = 0.2
    bias_std: float = 0.3
    embedding_std: float = 0.4
    head_gain: float = 2.0  # separates the logits, if the head has its own matrix
    # Factors of weights whose names match these patterns.
    gains: dict[str, float] = field(default_factory=dict)
    norm_mean: float = 1.0  # 0 if norms add one to the stored weight
    # Means of single norms: a tied head needs the gain of the final norm.
    means: dict[str, float] = field(default_factory=dict)
    neutral: str = "^$"  # names of weights without effect: a bias of k shifts all scores of a query equally
    attention: str = "eager"  # the attention implementation of the class
    random_buffers: tuple[str, ...] = ()
    starts: tuple[int, ...] = (BOS,)  # the first tokens of every prompt
    source_end: tuple[int, ...] = ()  # the last tokens of every encoder input
    prompt_lens: tuple[int, ...] = (1, 5, 23, 40)
    reserve: Callable[[torch.nn.Module, int], str] | None = None  # fixes length-dependent RoPE; returns the side
    pool: bool = False  # an embedding model, without mask head
    files: dict = field(default_factory=dict)  # additional JSON files, by path
    # Keys of config.json with other values, each of which must change the outputs.
    matters: dict = field(default_factory=dict)

    @property
    def own(self) -> bool:
        """Returns whether the class is one of these scripts, created from config.json without changes."""
        return not issubclass(self.model, PreTrainedModel)

    @property
    def borrowed(self) -> bool:
        return bool(self.note)

    @property
    def folder(self) -> Path:
        return FIXTURES / self.name

    @property
    def words(self) -> range:
        """The ids that prompts consist of."""
        vocab = self.config.get("decoder_vocab_size") or self.config.get("vocab_size")
        return range(FIRST_WORD, vocab or self.config["padded_vocab_size"])

    @property
    def source_words(self) -> range:
        """The ids that encoder inputs consist of."""
        return range(FIRST_WORD, self.config["vocab_size"])
