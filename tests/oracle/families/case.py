"""What a fixture is: the words of its config.json, the class that answers for it, and how its files spell the weights.

Invariant: the reference's settings are read from the very config.json that is written; nothing else describes the
model, but for `settings` where the class belongs to another family.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import PreTrainedModel

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures" / "families"
MARGIN = 0.01
NOTICED = 2e-3  # twice what tests/it/oracle.rs lets pass
N_ANSWER = 16
BOS, EOS, MASK = 1, 2, 4
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
FIRST_WORD = 8  # ids below are special, by the shared tokenizer or by the family's own habit

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Layout:
    """How a family's files hold the weights that the reference holds."""

    reshape: Callable[[Tensors, dict], Tensors] | None = None  # tensors that the files hold in one
    names: tuple[tuple[str, str], ...] = ()  # then these patterns are replaced in all names, in order
    copies: tuple[tuple[str, str], ...] = ()  # a tensor, and the name under which the files hold it once more
    extra: Callable[[dict], Tensors] | None = None  # what files hold and no computation needs


@dataclass(frozen=True)
class Case:
    """A checkpoint to make. `config` is config.json, in the family's own words, less the storage type."""

    name: str
    model: type  # the class that computes the answers, of transformers or of `invented`
    config: dict
    kind: str = "decoder"  # or "encoder", "encoder-decoder"
    blocks: str = ""  # what it exercises, for README.md
    note: str = ""  # whose blocks are borrowed, where the class is another family's
    settings: Callable[[dict], dict] | None = None  # config.json in the words of a borrowed class
    patch: Callable[[torch.nn.Module, dict], None] | None = None  # what the borrowed class does otherwise
    layout: Layout = Layout()
    dtype: torch.dtype = F32
    dtype_key: str | None = "torch_dtype"
    std: float = 0.2
    bias_std: float = 0.3
    embedding_std: float = 0.4
    head_gain: float = 2.0  # spreads the logits, where the head has a matrix of its own
    # Factors of weights in whose names these patterns are found.
    gains: dict[str, float] = field(default_factory=dict)
    norm_mean: float = 1.0  # 0 where norms add one to what is stored
    # Of single norms: a tied head needs the last one's gain.
    means: dict[str, float] = field(default_factory=dict)
    neutral: str = "^$"  # names of weights that make no difference: all keys are moved alike by a bias
    attention: str = "eager"  # the class's way to compute attention
    random_buffers: tuple[str, ...] = ()
    starts: tuple[int, ...] = (BOS,)  # how every prompt opens
    source_end: tuple[int, ...] = ()  # how every source ends
    prompt_lens: tuple[int, ...] = (1, 5, 23, 40)
    reserve: Callable[[torch.nn.Module, int], str] | None = None  # fixes length-dependent RoPE; says the side
    pool: bool = False  # a text becomes one vector: no mask head
    files: dict = field(default_factory=dict)  # further JSON files, by path
    # Keys of config.json whose change, each by itself, must change the answers.
    matters: dict = field(default_factory=dict)

    @property
    def own(self) -> bool:
        """Whether the class is of these scripts, made from config.json as it is."""
        return not issubclass(self.model, PreTrainedModel)

    @property
    def borrowed(self) -> bool:
        return bool(self.note)

    @property
    def folder(self) -> Path:
        return FIXTURES / self.name

    @property
    def words(self) -> range:
        """Ids that prompts are made of."""
        vocab = self.config.get("vocab_size") or self.config["padded_vocab_size"]
        return range(FIRST_WORD, vocab)
