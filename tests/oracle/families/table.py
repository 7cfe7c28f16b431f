"""All cases, in the order of the table in README.md."""

from . import borrowed, decoders, encoders, gpt_kin, invented, latent, llama_kin, mixtures, openelm, translators

TABLES = [llama_kin, mixtures, latent, gpt_kin, decoders, openelm, borrowed, encoders, translators, invented]
CASES = [case for table in TABLES for case in table.CASES]
