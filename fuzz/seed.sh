#!/bin/sh
# Copies the fixtures that each target can read to fuzz/corpus/TARGET, as its initial inputs.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
fixtures=$here/../tests/fixtures
corpus=$here/corpus

# into TARGET FILE...: copies the files to the target's corpus, under names derived from their paths.
into() {
    target=$1
    shift
    mkdir -p "$corpus/$target"
    for file in "$@"; do
        cp "$file" "$corpus/$target/$(printf %s "${file#"$here"/../}" | tr / _)"
    done
}

# The values of tensors do not matter, so no large weight file is copied.
into safetensors "$fixtures"/sharded/model.safetensors.index.json
into pickle_stream "$fixtures"/pickle/kinds/stream.bin
into pickle_zip "$fixtures"/pickle/kinds/zip*.bin
into ctranslate2 "$fixtures"/families/ctranslate2_marian/model.bin
into llama2c "$fixtures"/llama2c/v2*.bin "$fixtures"/llama2c/tokenizer.bin
into config "$fixtures"/*/config.json "$fixtures"/families/*/config.json
into spec "$here"/../specs/*.toml
into tokenizer_json "$fixtures"/gqa/tokenizer.json "$fixtures"/f16/tokenizer.json "$fixtures"/families/tokenizer.json
into sentencepiece "$fixtures"/tokenizers/files/*.model
into tiktoken "$fixtures"/tokenizers/files/ranks.tiktoken
into word_piece "$fixtures"/tokenizers/files/vocab.txt
into chat_template "$fixtures"/chat/*.jinja
into grammar "$here"/../src/grammar/tests/grammars/*.gbnf
into generation_config "$fixtures"/*/generation_config.json "$fixtures"/*/tokenizer_config.json \
    "$fixtures"/families/xlm_roberta/1_Pooling/config.json
into saved_model "$fixtures"/gguf/q4_0.gguf

python3 "$here/seeds.py" "$fixtures" "$corpus"
echo "The seeds are in $corpus."
