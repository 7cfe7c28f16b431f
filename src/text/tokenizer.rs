//! A model's vocabulary: text to ids, ids to text, and what each id is alone.
//!
//! Encoding is that of the `tokenizers` library, or for llama2.c files our own. Decoding is ours for the
//! decoders that put bytes side by side, which are those of nearly every generating model: a token's bytes
//! then do not depend on its neighbours, and text can leave token by token.
//!
//! Invariant: every id that encoding gives is below `vocab_size` and has its bytes here, and an id that the
//! vocabulary lacks is decoded to nothing.

use super::pieces::Pieces;
use super::scored_bpe::{BOS, CONTROLS, EOS, ScoredBpe};
use crate::formats::chat::TOKENIZER_CONFIG;
use crate::formats::{Folder, HubConfig};
use anyhow::{Context, Result, anyhow, ensure};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use tokenizers::Tokenizer as Library;

const TOKENIZER: &str = "tokenizer.json";

/// Ids must be below this: a vocabulary a hundred times the largest in use.
const VOCAB_MAX: u32 = 1 << 24;

/// Text to ids and back.
pub struct Tokenizer {
    encoder: Encoder,
    joining: Joining,
    pieces: Pieces,
    special: BTreeSet<u32>,
    bos: Option<u32>,
    eos: Option<u32>,
    /// BOS is ours to put before a text; otherwise the library does it, or nobody.
    prepends_bos: bool,
    /// The library puts BOS before every text, and the model's settings say not to.
    drops_bos: bool,
}

enum Encoder {
    Library(Box<Library>),
    Scored(ScoredBpe),
    /// A token for each byte.
    Bytes,
}

/// How tokens become text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Joining {
    /// Their bytes side by side; a space that opens the whole text may be dropped.
    Bytes { drops_first_space: bool },
    /// As only the library knows.
    Library,
}

impl Tokenizer {
    /// The tokenizer in a hub model's folder: `tokenizer.json`, and `tokenizer_config.json` if it is there.
    pub fn from_folder(folder: &Folder) -> Result<Tokenizer> {
        let name = || folder.file(TOKENIZER).display().to_string();
        let library = read_library(&folder.read_needed(TOKENIZER)?).with_context(name)?;
        let (joining, pieces) = read_pieces(&library).with_context(name)?;
        let added = library.get_added_tokens_decoder();
        let special = added.iter().filter(|(_, token)| token.special).map(|(id, _)| *id).collect();
        let settings = Settings::read(folder, &library)?;
        let (bos, eos) = (settings.bos, settings.eos);
        let mut tokenizer = Tokenizer {
            encoder: Encoder::Library(Box::new(library)),
            joining,
            pieces,
            special,
            bos,
            eos,
            prepends_bos: false,
            drops_bos: false,
        };
        let library_prepends = bos.is_some() && tokenizer.encode("", true)?.first() == bos.as_ref();
        tokenizer.prepends_bos = settings.add_bos == Some(true) && !library_prepends;
        tokenizer.drops_bos = settings.add_bos == Some(false) && library_prepends;
        Ok(tokenizer)
    }

    /// The tokenizer of a llama2.c model with `vocab` tokens. BOS is 1, before every text; EOS is 2, but
    /// models trained with llama2.c end a text with BOS.
    pub fn from_llama2c(file: &Path, vocab: usize) -> Result<Tokenizer> {
        let name = || file.display().to_string();
        let content = std::fs::read(file).with_context(name)?;
        let (bpe, pieces) = ScoredBpe::read(&content, vocab).with_context(name)?;
        Ok(Tokenizer {
            encoder: Encoder::Scored(bpe),
            joining: Joining::Bytes { drops_first_space: true },
            pieces,
            special: (0..CONTROLS).collect(),
            bos: Some(BOS),
            eos: Some(EOS),
            prepends_bos: true,
            drops_bos: false,
        })
    }

    /// A stand-in for a model of `vocab` tokens, at least 256, that has no tokenizer: the first 256 are the
    /// bytes, and each of the others, which encoding never gives, reads as a space and its id.
    pub fn bytes(vocab: usize) -> Result<Tokenizer> {
        const BYTES: usize = 256;
        ensure!(vocab >= BYTES, "a vocabulary of {vocab} tokens has none for each byte: {BYTES} are needed");
        let mut pieces = Pieces::default();
        (0..=u8::MAX).for_each(|byte| pieces.push(&[byte]));
        (BYTES..vocab).for_each(|id| pieces.push(format!(" {id}").as_bytes()));
        Ok(Tokenizer {
            encoder: Encoder::Bytes,
            joining: Joining::Bytes { drops_first_space: false },
            pieces,
            special: BTreeSet::new(),
            bos: None,
            eos: None,
            prepends_bos: false,
            drops_bos: false,
        })
    }

    /// The ids of a text; with the tokens the model expects around it if `add_special`.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>> {
        let ids = match &self.encoder {
            Encoder::Library(library) => {
                library.encode_fast(text, add_special).map_err(|e| anyhow!(e))?.get_ids().to_vec()
            }
            Encoder::Scored(bpe) => bpe.encode(text),
            Encoder::Bytes => text.bytes().map(u32::from).collect(),
        };
        let bos = self.bos.filter(|_| add_special && self.prepends_bos);
        let dropped = usize::from(add_special && self.drops_bos);
        Ok(bos.into_iter().chain(ids.into_iter().skip(dropped)).collect())
    }

    /// The text of ids. Bytes that are no UTF-8 become U+FFFD; ids the vocabulary does not have are left out.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        let spoken = ids.iter().copied().filter(|id| self.is_spoken(*id, skip_special));
        let Joining::Bytes { drops_first_space } = self.joining else {
            return self.join(&spoken.collect::<Vec<_>>());
        };
        let bytes: Vec<u8> = spoken.flat_map(|id| self.pieces.get(id)).copied().collect();
        let dropped = usize::from(drops_first_space && bytes.first() == Some(&b' '));
        Ok(String::from_utf8_lossy(&bytes[dropped..]).into_owned())
    }

    /// One more than the largest id.
    pub fn vocab_size(&self) -> usize {
        self.pieces.len()
    }

    /// The bytes of a token, as it stands amid others; a special token's are its name.
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        self.pieces.get(id)
    }

    /// The token alone, as it stands amid others; bytes that are no UTF-8 become U+FFFD.
    pub fn token_text(&self, id: u32) -> String {
        String::from_utf8_lossy(self.pieces.get(id)).into_owned()
    }

    /// The token that opens a text.
    pub fn bos_id(&self) -> Option<u32> {
        self.bos
    }

    /// The token that ends a text, as the tokenizer's files say; a model's own settings may name others.
    pub fn eos_id(&self) -> Option<u32> {
        self.eos
    }

    /// Whether a token steers the model and is no text.
    pub fn is_special(&self, id: u32) -> bool {
        self.special.contains(&id)
    }

    /// Whether a token has a part in the text: it has bytes, and is not skipped.
    pub(super) fn is_spoken(&self, id: u32, skip_special: bool) -> bool {
        let skipped = skip_special && self.is_special(id);
        !skipped && !self.pieces.get(id).is_empty()
    }

    pub(super) fn joining(&self) -> Joining {
        self.joining
    }

    /// The text of tokens that are all spoken, by the library's decoder.
    pub(super) fn join(&self, ids: &[u32]) -> Result<String> {
        match &self.encoder {
            Encoder::Library(library) => library.decode(ids, false).map_err(|e| anyhow!(e)),
            Encoder::Scored(_) | Encoder::Bytes => {
                unreachable!("its pieces are joined as bytes; this is a bug")
            }
        }
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tokenizer({} tokens)", self.vocab_size())
    }
}

/// Reads a `tokenizer.json`. Its truncation and padding are left out: here a long prompt is refused, never
/// cut.
fn read_library(content: &[u8]) -> Result<Library> {
    // The library trusts that a file's parts fit together, and panics over some that do not.
    let read = catch_unwind(|| Library::from_bytes(content));
    let mut library = read.map_err(|_| anyhow!("its parts do not fit together"))?.map_err(|e| anyhow!(e))?;
    library.with_truncation(None).map_err(|e| anyhow!(e))?;
    library.with_padding(None);
    Ok(library)
}

/// How the library's tokens join, and the bytes of each.
fn read_pieces(library: &Library) -> Result<(Joining, Pieces)> {
    let largest = library.get_vocab(true).into_values().max().context("its vocabulary is empty")?;
    ensure!(largest < VOCAB_MAX, "its largest token id is {largest}: ids must be below {VOCAB_MAX}");
    let decoder = serde_json::to_value(library.get_decoder())?;
    let known = Spelling::of_decoder(&decoder);
    let mut pieces = Pieces::default();
    for id in 0..=largest {
        match (&known, library.id_to_token(id)) {
            (_, None) => pieces.push(b""),
            (Some((spelling, _)), Some(token)) => pieces.push(&spelling.bytes(&token)),
            (None, Some(_)) => pieces.push(library_piece(library, id)?.as_bytes()),
        }
    }
    let joining = match known {
        Some((_, drops_first_space)) => Joining::Bytes { drops_first_space },
        None => Joining::Library,
    };
    Ok((joining, pieces))
}

/// A token's text after another token: what it adds when it comes twice, or if that is nothing, its text
/// alone.
fn library_piece(library: &Library, id: u32) -> Result<String> {
    let decode = |ids: &[u32]| {
        let decoded = catch_unwind(AssertUnwindSafe(|| library.decode(ids, false)));
        decoded.map_err(|_| anyhow!("its decoder cannot decode token {id}"))?.map_err(|e| anyhow!(e))
    };
    let (once, twice) = (decode(&[id])?, decode(&[id, id])?);
    let added = twice.strip_prefix(&once).filter(|added| !added.is_empty());
    Ok(added.unwrap_or(&once).to_owned())
}

/// How a vocabulary spells bytes in its tokens' names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Spelling {
    /// Every byte as a printable character.
    ByteLevel,
    /// A space as U+2581, and a byte that is no text of its own as `<0xNN>`.
    ByteFallback,
}

impl Spelling {
    /// The spelling that a decoder undoes, and whether it drops a space that opens the text; `None` if it
    /// does more than put bytes side by side.
    fn of_decoder(decoder: &Value) -> Option<(Spelling, bool)> {
        if decoder["type"] == "ByteLevel" {
            return Some((Spelling::ByteLevel, false));
        }
        let fallback = [
            json!({"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "}),
            json!({"type": "ByteFallback"}),
            json!({"type": "Fuse"}),
        ];
        let drop_first = json!({"type": "Strip", "content": " ", "start": 1, "stop": 0});
        match decoder["decoders"].as_array()?.strip_prefix(&fallback)? {
            [] => Some((Spelling::ByteFallback, false)),
            [last] if *last == drop_first => Some((Spelling::ByteFallback, true)),
            _ => None,
        }
    }

    /// The bytes that a token's name spells.
    fn bytes(self, token: &str) -> Vec<u8> {
        match self {
            // A token with any other character, an added one, stands for itself.
            Spelling::ByteLevel => {
                token.chars().map(byte_of_character).collect::<Option<_>>().unwrap_or(token.into())
            }
            Spelling::ByteFallback => match byte_of_name(token) {
                Some(byte) => vec![byte],
                None => token.replace('\u{2581}', " ").into_bytes(),
            },
        }
    }
}

/// The byte of a character in the alphabet of GPT-2: printable Latin-1 characters stand for themselves, and
/// the other 68 bytes are, in order, the characters from U+0100 on.
pub(super) fn byte_of_character(character: char) -> Option<u8> {
    let byte = match u32::from(character) {
        code @ (0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff) => code,
        code @ 0x100..=0x120 => code - 0x100,
        code @ 0x121..=0x142 => code - 0x121 + 0x7f,
        0x143 => 0xad,
        _ => return None,
    };
    Some(byte as u8)
}

/// The byte that a name like `<0x0A>` stands for.
fn byte_of_name(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() == 2 { u8::from_str_radix(digits, 16).ok() } else { None }
}

/// What `tokenizer_config.json` says of the tokens around a text; nothing if there is no such file.
#[derive(Default)]
struct Settings {
    add_bos: Option<bool>,
    bos: Option<u32>,
    eos: Option<u32>,
}

impl Settings {
    fn read(folder: &Folder, library: &Library) -> Result<Settings> {
        let Some(settings) = HubConfig::read_if_present(folder, TOKENIZER_CONFIG)? else {
            return Ok(Settings::default());
        };
        let id = |key: &str| {
            let Some(name) = settings.opt_token(key)? else { return Ok(None) };
            let missing = || settings.wrong(key, format_args!("{TOKENIZER} has no token '{name}'"));
            library.token_to_id(name).ok_or_else(missing).map(Some)
        };
        let add_bos = settings.opt_bool("add_bos_token")?;
        Ok(Settings { add_bos, bos: id("bos_token")?, eos: id("eos_token")? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::formats::scratch::Scratch;
    use crate::text::samples::{Dice, byte_fallback, byte_level, hub, llama2c, metaspace, word_piece};

    #[test]
    fn our_decoding_is_the_librarys() {
        let mut dice = Dice::new(21);
        // The library turns a whole run of bytes that holds one wrong one into U+FFFD, valid characters among
        // them; ours keeps those. So byte tokens are left out where runs matter.
        for (sample, left_out) in [(byte_level(), 0..0), (byte_fallback(), 3..259)] {
            let tokenizer = hub(&sample, None).unwrap();
            assert_ne!(tokenizer.joining(), Joining::Library);
            let known: Vec<u32> =
                (0..tokenizer.vocab_size() as u32 + 2).filter(|id| !left_out.contains(id)).collect();
            for _ in 0..500 {
                let ids: Vec<u32> = (0..dice.below(12)).map(|_| *dice.pick(&known)).collect();
                assert_eq!(tokenizer.decode(&ids, false).unwrap(), tokenizer.join(&ids).unwrap(), "{ids:?}");
                let Encoder::Library(library) = &tokenizer.encoder else { panic!("a hub tokenizer") };
                assert_eq!(
                    tokenizer.decode(&ids, true).unwrap(),
                    library.decode(&ids, true).unwrap(),
                    "{ids:?}"
                );
            }
        }
    }

    #[test]
    fn text_survives_encoding_and_decoding() {
        let texts = ["", "the", " the", "  the  the ", "été\n", "日本 \u{1f600}e", "\0", "a \u{fffd} b"];
        for tokenizer in [hub(&byte_level(), None).unwrap(), hub(&byte_fallback(), None).unwrap(), llama2c()]
        {
            for text in texts {
                for add_special in [false, true] {
                    let ids = tokenizer.encode(text, add_special).unwrap();
                    assert_eq!(tokenizer.decode(&ids, true).unwrap(), text, "{tokenizer:?} {ids:?}");
                }
            }
        }
        for (sample, text) in [(word_piece(), "there ab."), (metaspace(), "the the")] {
            let tokenizer = hub(&sample, None).unwrap();
            assert_eq!(tokenizer.joining(), Joining::Library);
            assert_eq!(tokenizer.decode(&tokenizer.encode(text, false).unwrap(), true).unwrap(), text);
        }
    }

    #[test]
    fn special_tokens_are_skipped_only_when_asked() {
        let tokenizer = hub(&byte_fallback(), None).unwrap();
        let ids = [1, 266, 2, 266];
        assert_eq!(tokenizer.decode(&ids, true).unwrap(), "the the");
        assert_eq!(tokenizer.decode(&ids, false).unwrap(), "<s> the</s> the");
        assert!(tokenizer.is_special(2) && !tokenizer.is_special(266) && !tokenizer.is_special(9999));
        let tokenizer = llama2c();
        let ids = [&[1][..], &tokenizer.encode("the", false).unwrap(), &[2]].concat();
        assert_eq!(tokenizer.decode(&ids, false).unwrap(), "<s> the</s>");
        assert_eq!(tokenizer.decode(&ids, true).unwrap(), "the");
        let tokenizer = hub(&byte_level(), None).unwrap();
        assert!(!tokenizer.is_special(264));
        assert_eq!(tokenizer.decode(&[264, 0], true).unwrap(), "two words");
    }

    #[test]
    fn a_token_alone_is_what_it_is_amid_others() {
        let byte_level = hub(&byte_level(), None).unwrap();
        assert_eq!(byte_level.token_text(260), " the");
        assert_eq!(byte_level.token_text(261), "é");
        assert_eq!(
            (byte_level.token_bytes(2 + 0xc3), byte_level.token_text(2 + 0xc3)),
            (&[0xc3][..], "\u{fffd}".into())
        );
        assert_eq!(byte_level.token_text(1), "</s>");
        assert_eq!((byte_level.token_text(9999), byte_level.vocab_size()), (String::new(), 265));
        let fallback = hub(&byte_fallback(), None).unwrap();
        assert_eq!((fallback.token_text(266), fallback.token_bytes(3 + 0xff)), (" the".into(), &[0xff][..]));
        assert_eq!((llama2c().token_text(1), llama2c().token_bytes(3 + 0x41)), ("<s>".into(), &b"A"[..]));
        let word_piece = hub(&word_piece(), None).unwrap();
        assert_eq!((word_piece.token_text(2), word_piece.token_text(3)), (" the".into(), "re".into()));
        let metaspace = hub(&metaspace(), None).unwrap();
        assert_eq!((metaspace.token_text(8), metaspace.token_text(7)), (" the".into(), "he".into()));
    }

    #[test]
    fn bos_stands_before_a_text_once_if_the_files_say_so() {
        let named = json!({"add_bos_token": true, "bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": false}});
        let cases = [
            (byte_level(), Some(named.clone()), Some(0), Some(1), vec![0, 2 + 0x61]),
            (byte_level(), Some(json!({"add_bos_token": true})), None, None, vec![2 + 0x61]),
            (
                byte_level(),
                Some(json!({"bos_token": "<s>", "eos_token": null})),
                Some(0),
                None,
                vec![2 + 0x61],
            ),
            (byte_level(), None, None, None, vec![2 + 0x61]),
            (byte_fallback(), Some(named), Some(1), Some(2), vec![1, 259, 3 + 0x61]),
            (byte_fallback(), None, None, None, vec![1, 259, 3 + 0x61]),
            (
                byte_fallback(),
                Some(json!({"add_bos_token": false, "bos_token": "<s>"})),
                Some(1),
                None,
                vec![259, 3 + 0x61],
            ),
        ];
        for (sample, config, bos, eos, ids) in cases {
            let tokenizer = hub(&sample, config.clone()).unwrap();
            assert_eq!((tokenizer.bos_id(), tokenizer.eos_id()), (bos, eos), "{config:?}");
            assert_eq!(tokenizer.encode("a", true).unwrap(), ids, "{config:?}");
            let opening = ids.len() - tokenizer.encode("a", false).unwrap().len();
            assert_eq!(tokenizer.encode("a", false).unwrap(), ids[opening..], "{config:?}");
        }
        let tokenizer = llama2c();
        assert_eq!((tokenizer.bos_id(), tokenizer.eos_id()), (Some(1), Some(2)));
        assert_eq!(tokenizer.encode("", true).unwrap(), [1]);
        assert_eq!(tokenizer.encode("A", true).unwrap(), [1, 259, 3 + 0x41]);
        assert_eq!(tokenizer.encode("A", false).unwrap(), [259, 3 + 0x41]);
    }

    #[test]
    fn bytes_stand_in_for_a_tokenizer() {
        assert!(Tokenizer::bytes(255).is_err());
        let tokenizer = Tokenizer::bytes(300).unwrap();
        assert_eq!((tokenizer.vocab_size(), tokenizer.bos_id(), tokenizer.eos_id()), (300, None, None));
        let text = "a\0 \u{1f600}\u{fffd}";
        let ids = tokenizer.encode(text, true).unwrap();
        assert!(ids.iter().copied().eq(text.bytes().map(u32::from)));
        assert_eq!(tokenizer.decode(&ids, true).unwrap(), text);
        assert_eq!(tokenizer.decode(&[97, 299, 256, 300, 98], true).unwrap(), "a 299 256b");
        assert!((0..300).all(|id| tokenizer.is_spoken(id, true)));
    }

    #[test]
    fn a_tokenizer_is_shared_between_threads() {
        fn shared<T: Send + Sync>(_: &T) {}
        shared(&llama2c());
    }

    #[test]
    fn truncation_and_padding_in_the_file_are_left_out() {
        let mut sample = byte_level();
        sample["truncation"] =
            json!({"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"});
        sample["padding"] = json!({"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": null,
            "pad_id": 0, "pad_type_id": 0, "pad_token": "<s>"});
        assert_eq!(hub(&sample, None).unwrap().encode("abcd", true).unwrap().len(), 4);
    }

    #[test]
    fn files_that_cannot_be_are_refused_by_name() {
        let with = |key: &str, value: Value| {
            let mut sample = byte_level();
            *sample.pointer_mut(key).unwrap() = value;
            sample
        };
        let bpe = |id: u32| json!({"type": "BPE", "vocab": {"a": id}, "merges": []});
        let good = byte_level;
        let cases = [
            (json!([]), None, "tokenizer.json"),
            (json!({"model": {"type": "Nonsense"}}), None, "tokenizer.json"),
            (with("/model/merges", json!([["Ġ", "absent"]])), None, "absent"),
            (with("/model/merges", json!([["two words", "two words"]])), None, "tokenizer.json"),
            (with("/model/merges", json!([["</s>", "</s>"]])), None, "its parts do not fit together"),
            (with("/model", bpe(1 << 24)), None, "ids must be below"),
            (with("/model", bpe(u32::MAX)), None, "tokenizer.json"),
            (
                good(),
                Some(json!({"bos_token": "<bos>"})),
                "key 'bos_token': tokenizer.json has no token '<bos>'",
            ),
            (
                good(),
                Some(json!({"eos_token": {"content": "<e>"}})),
                "key 'eos_token': tokenizer.json has no",
            ),
            (good(), Some(json!({"eos_token": 2})), "tokenizer_config.json"),
            (good(), Some(json!("text")), "tokenizer_config.json"),
        ];
        for (tokenizer, config, reason) in cases {
            let error = format!("{:#}", hub(&tokenizer, config).unwrap_err());
            assert!(error.contains(reason), "{error}\nexpected: {reason}");
        }
        let folder = Scratch::new();
        let error = format!("{:#}", Tokenizer::from_folder(&folder.folder()).unwrap_err());
        assert!(error.contains(TOKENIZER), "{error}");
        let bin = folder.write("tokenizer.bin", &[1, 2]);
        let error = format!("{:#}", Tokenizer::from_llama2c(&bin, 300).unwrap_err());
        assert!(error.contains("tokenizer.bin") && error.contains("truncated"), "{error}");
    }
}
