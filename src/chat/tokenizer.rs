//! Text ↔ token ids: Qwen's byte-level BPE.
//!
//! The encoder knows no control tokens at all, so no text whatever can become one; they live in a table of their own
//! ([`Tokenizer::control`]), which only [`super::template`] and the masks use.
//!
//! The merges are our own code, because building the `tokenizers` model from a GGUF takes a good part of the time that a
//! start may take. Its NFC and its regular expression are used as they are, and a test holds the ids against it.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::fmt;
use std::path::Path;

use tokenizers::NormalizedString;
use tokenizers::normalizer::Range as NormalizedRange;
use tokenizers::utils::SysRegex;

/// How Qwen2 and Qwen2.5 cut text before the merges.
const QWEN2_SPLIT: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// GGUF's `tokenizer.ggml.token_type`.
pub(super) mod token_type {
    pub const NORMAL: i32 = 1;
    pub const CONTROL: i32 = 3;
    pub const USER_DEFINED: i32 = 4;
}

/// Why a tokenizer cannot be built; the text names the file or field and what was expected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenizerError(pub String);

impl fmt::Display for TokenizerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for TokenizerError {}

fn error<T>(why: impl Into<String>) -> Result<T, TokenizerError> {
    Err(TokenizerError(why.into()))
}

/// Token bytes → id: open addressing over ids, the bytes being held elsewhere. Filling it takes 3 ms for Qwen's vocabulary,
/// a map of owned keys thirty times as long.
struct Lookup {
    slots: Vec<u32>,
}

const NONE: u32 = u32::MAX;

impl Lookup {
    fn new(tokens: usize) -> Lookup {
        Lookup { slots: vec![NONE; (tokens * 2).next_power_of_two().max(16)] }
    }

    fn hash(bytes: &[u8]) -> u64 {
        let mut hash = bytes.len() as u64;
        for chunk in bytes.chunks(8) {
            let mut word = [0u8; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            hash = (hash.rotate_left(26) ^ u64::from_le_bytes(word)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        }
        hash
    }

    /// The slots in which `bytes` can stand, endlessly.
    fn probes(&self, bytes: &[u8]) -> impl Iterator<Item = usize> + use<> {
        let mask = self.slots.len() - 1;
        let start = (Self::hash(bytes) >> (64 - self.slots.len().trailing_zeros())) as usize;
        (0..).map(move |i| (start + i) & mask)
    }

    /// `bytes` are those of `id` and stand nowhere yet.
    fn insert(&mut self, bytes: &[u8], id: u32) {
        if let Some(free) = self.probes(bytes).find(|&slot| self.slots[slot] == NONE) {
            self.slots[free] = id;
        }
    }

    fn find<'a>(&self, bytes: &[u8], bytes_of: impl Fn(u32) -> &'a [u8]) -> Option<u32> {
        for slot in self.probes(bytes) {
            match self.slots[slot] {
                NONE => return None,
                id if bytes_of(id) == bytes => return Some(id),
                _ => {}
            }
        }
        None
    }
}

/// How a token comes to be: of which halves, and how early.
#[derive(Clone, Copy)]
struct Merge {
    /// A lower rank merges first.
    rank: u32,
    /// The bytes of the left half. With the token's own bytes it says what both halves are.
    left: u32,
}

/// Qwen's tokenizer.
pub struct Tokenizer {
    split: SysRegex,
    /// The id of each single byte.
    byte_ids: [u32; 256],
    lookup: Lookup,
    /// By id; rank `NONE` where no merge makes the token.
    merges: Vec<Merge>,
    /// Further ways to make a token: (id, bytes of the left half) → rank. Qwen has none.
    other_merges: HashMap<(u32, u32), u32>,
    /// The bytes of all tokens, one after another; token `i` is `bytes[ends[i - 1]..ends[i]]`. Empty: unused.
    bytes: Vec<u8>,
    ends: Vec<u32>,
    controls: Vec<(String, u32)>,
    vocab_size: usize,
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tokenizer({} ids, {} control tokens)", self.vocab_size, self.controls.len())
    }
}

impl Tokenizer {
    /// From a GGUF's `tokenizer.ggml.tokens` (byte-level form), `merges` ("left right"), `token_type` and `pre`.
    ///
    /// Errors: another pre-tokenizer than `qwen2`, lists of unequal length, a merge into a token that is not there.
    pub fn from_vocab<S: AsRef<str>>(
        tokens: &[S],
        merges: &[S],
        token_types: &[i32],
        pre: &str,
    ) -> Result<Tokenizer, TokenizerError> {
        if pre != "qwen2" {
            return error(format!(
                "the pre-tokenizer is `{pre}` (tokenizer.ggml.pre); only `qwen2` is built in, so this model cannot be run"
            ));
        }
        if tokens.len() != token_types.len() {
            return error(format!(
                "the vocabulary has {} tokens but {} token types (tokenizer.ggml.token_type); the file is damaged",
                tokens.len(),
                token_types.len()
            ));
        }
        let kinds = token_types.iter().map(|&t| match t {
            token_type::NORMAL => Kind::Text,
            token_type::CONTROL | token_type::USER_DEFINED => Kind::Control,
            _ => Kind::Unused,
        });
        let tokens: Vec<(&str, Kind)> = tokens.iter().map(AsRef::as_ref).zip(kinds).collect();
        let merges = merges.iter().map(|merge| {
            // No byte-level token holds a space.
            let merge = merge.as_ref();
            merge.split_once(' ').ok_or_else(|| TokenizerError(format!("the merge `{merge}` is not `left right`")))
        });
        Tokenizer::build(&tokens, merges)
    }

    /// From a Hugging Face `tokenizer.json`.
    ///
    /// Errors: not readable, not JSON, or anything but a byte-level BPE with Qwen2's splitting and NFC.
    pub fn from_file(path: &Path) -> Result<Tokenizer, TokenizerError> {
        let text = std::fs::read_to_string(path)
            .map_err(|e| TokenizerError(format!("{}: cannot be read: {e}", path.display())))?;
        Tokenizer::from_json(&text).map_err(|e| TokenizerError(format!("{}: {e}", path.display())))
    }

    /// From the text of a Hugging Face `tokenizer.json`. Errors as [`Tokenizer::from_file`].
    pub fn from_json(text: &str) -> Result<Tokenizer, TokenizerError> {
        let file: file::TokenizerJson =
            serde_json::from_str(text).map_err(|e| TokenizerError(format!("not a tokenizer.json: {e}")))?;
        if file.model.kind.as_deref().is_some_and(|kind| kind != "BPE") {
            return error(format!("the model is `{}`; only BPE is built in", file.model.kind.unwrap_or_default()));
        }
        let normalizer = file.normalizer.as_ref().and_then(|n| n["type"].as_str()).unwrap_or("none");
        if normalizer != "NFC" {
            return error(format!("the normalizer is `{normalizer}`; only NFC, Qwen's, is built in"));
        }
        // Any tokenizer.json of the family holds the expression literally, as the pattern of a `Split`.
        let holds_split = match &file.pre_tokenizer {
            serde_json::Value::Object(pre) => {
                let steps = pre.get("pretokenizers").and_then(|p| p.as_array()).cloned();
                let steps = steps.unwrap_or_else(|| vec![file.pre_tokenizer.clone()]);
                steps.iter().any(|step| step["pattern"]["Regex"].as_str() == Some(QWEN2_SPLIT))
            }
            _ => false,
        };
        if !holds_split {
            return error("the pre-tokenizer is not Qwen2's; only that is built in");
        }
        let size = file.model.vocab.values().copied().chain(file.added_tokens.iter().map(|t| t.id)).max();
        let size = size.map_or(0, |max| max as usize + 1);
        if size > 1 << 24 {
            return error(format!("the highest token id is {}, which is not believable", size - 1));
        }
        let mut tokens = vec![("", Kind::Unused); size];
        for (token, &id) in &file.model.vocab {
            tokens[id as usize] = (token.as_str(), Kind::Text);
        }
        for added in &file.added_tokens {
            tokens[added.id as usize] = (added.content.as_str(), Kind::Control);
        }
        let merges = file.model.merges.iter().map(|merge| match merge {
            file::Merge::Pair((left, right)) => Ok((left.as_str(), right.as_str())),
            file::Merge::Line(line) => {
                line.split_once(' ').ok_or_else(|| TokenizerError(format!("the merge `{line}` is not `left right`")))
            }
        });
        Tokenizer::build(&tokens, merges)
    }

    fn build<'a>(
        tokens: &[(&'a str, Kind)],
        merges: impl ExactSizeIterator<Item = Result<(&'a str, &'a str), TokenizerError>>,
    ) -> Result<Tokenizer, TokenizerError> {
        let to_byte = byte_of_char();
        let mut bytes = Vec::with_capacity(tokens.len() * 8);
        let mut ends = Vec::with_capacity(tokens.len());
        let mut controls = Vec::new();
        let mut lookup = Lookup::new(tokens.len());
        let mut vocab_size = 0;
        for (id, &(token, kind)) in tokens.iter().enumerate() {
            match kind {
                Kind::Unused => {}
                Kind::Control => {
                    bytes.extend_from_slice(token.as_bytes());
                    controls.push((token.to_owned(), id as u32));
                    vocab_size = id + 1;
                }
                Kind::Text => {
                    let start = bytes.len();
                    for c in token.chars() {
                        match to_byte.get(c as usize).copied().flatten() {
                            Some(byte) => bytes.push(byte),
                            None => return error(format!("token {id}, `{token}`, is not in the byte-level alphabet")),
                        }
                    }
                    lookup.insert(&bytes[start..], id as u32);
                    vocab_size = id + 1;
                }
            }
            ends.push(bytes.len() as u32);
        }

        let bytes_of = |id: u32| slice(&bytes, &ends, id);
        let mut byte_ids = [0u32; 256];
        for byte in 0..=255u8 {
            let Some(id) = lookup.find(&[byte], bytes_of) else {
                return error(format!(
                    "the vocabulary has no token for the byte {byte:#04x}; it is not a byte-level one"
                ));
            };
            byte_ids[byte as usize] = id;
        }

        let mut made = vec![Merge { rank: NONE, left: 0 }; tokens.len()];
        let mut other_merges = HashMap::new();
        for (rank, merge) in merges.enumerate() {
            let (left, right) = merge?;
            // Usually merge n makes token 256 + n; looking there first saves a lookup.
            let guess = rank + 256;
            let fits = tokens.get(guess).is_some_and(|(token, kind)| {
                *kind == Kind::Text && token.strip_prefix(left).is_some_and(|rest| rest == right)
            });
            let id = if fits {
                Some(guess as u32)
            } else {
                let joined = left.chars().chain(right.chars()).map(|c| to_byte.get(c as usize).copied().flatten());
                joined.collect::<Option<Vec<u8>>>().and_then(|joined| lookup.find(&joined, bytes_of))
            };
            let Some(id) = id else {
                return error(format!("the merge `{left} {right}` makes a token that is not in the vocabulary"));
            };
            let merge = Merge { rank: rank as u32, left: left.chars().count() as u32 };
            let known = &mut made[id as usize];
            if known.rank == NONE {
                *known = merge;
            } else if known.left != merge.left {
                other_merges.entry((id, merge.left)).or_insert(merge.rank);
            }
        }
        let split = SysRegex::new(QWEN2_SPLIT).map_err(|e| TokenizerError(format!("the splitting expression: {e}")))?;
        Ok(Tokenizer { split, byte_ids, lookup, merges: made, other_merges, bytes, ends, controls, vocab_size })
    }

    /// One more than the highest id that means something, control tokens included. The logits may have more rows.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// The id of a control token by its name, e.g. `<|im_end|>`.
    pub fn control(&self, name: &str) -> Option<u32> {
        self.controls.iter().find(|(n, _)| n == name).map(|&(_, id)| id)
    }

    /// All control tokens: name and id.
    pub fn controls(&self) -> &[(String, u32)] {
        &self.controls
    }

    /// The bytes of a token; a control token's are its name. Empty for an id that means nothing.
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        slice(&self.bytes, &self.ends, id)
    }

    /// The bytes that these ids stand for. They need not be valid UTF-8 when the ids stop inside a character.
    pub fn decode(&self, ids: &[u32]) -> Vec<u8> {
        ids.iter().flat_map(|&id| self.token_bytes(id)).copied().collect()
    }

    /// The ids of `text`, normalised to NFC first as Qwen does. Never a control token.
    pub fn encode_text(&self, text: &str) -> Vec<u32> {
        self.encode_with_offsets(text).into_iter().map(|(id, _)| id).collect()
    }

    /// As [`Tokenizer::encode_text`], each id with the offset in `text` at which its first byte stands.
    pub fn encode_with_offsets(&self, text: &str) -> Vec<(u32, usize)> {
        let mut out = Vec::with_capacity(text.len() / 3);
        if text.is_ascii() {
            self.encode_into(text, &mut out);
            return out;
        }
        let mut normal = NormalizedString::from(text);
        normal.nfc();
        self.encode_into(normal.get(), &mut out);
        if normal.get() != text {
            for (_, offset) in &mut out {
                let at = *offset;
                // A token can start inside a character; the conversion wants a whole one.
                let start = (0..=at).rev().find(|&i| normal.get().is_char_boundary(i)).unwrap_or(0);
                let end = (at + 1..=normal.get().len()).find(|&i| normal.get().is_char_boundary(i));
                let end = end.unwrap_or(normal.get().len());
                *offset = normal.convert_offsets(NormalizedRange::Normalized(start..end)).map_or(at, |r| r.start);
            }
        }
        out
    }

    /// The ids whose bytes are exactly those of `text`: no normalisation. For text that a grammar prescribes to the byte.
    pub fn encode_exact(&self, text: &str) -> Vec<u32> {
        let mut out = Vec::new();
        self.encode_into(text, &mut out);
        out.into_iter().map(|(id, _)| id).collect()
    }

    fn encode_into(&self, text: &str, out: &mut Vec<(u32, usize)>) {
        let mut at = 0;
        for (start, end) in self.split.find_iter(text) {
            if at < start {
                self.merge(&text.as_bytes()[at..start], at, out);
            }
            self.merge(&text.as_bytes()[start..end], start, out);
            at = end;
        }
        if at < text.len() {
            self.merge(&text.as_bytes()[at..], at, out);
        }
    }

    /// The token that these two neighbours make, and its rank.
    fn merged(&self, both: &[u8], left: usize) -> Option<(u32, u32)> {
        let id = self.lookup.find(both, |id| self.token_bytes(id))?;
        let merge = self.merges[id as usize];
        if merge.rank != NONE && merge.left as usize == left {
            return Some((merge.rank, id));
        }
        if self.other_merges.is_empty() {
            return None;
        }
        self.other_merges.get(&(id, left as u32)).map(|&rank| (rank, id))
    }

    /// Merges one word: again and again the pair of the lowest rank, the leftmost first.
    fn merge(&self, word: &[u8], offset: usize, out: &mut Vec<(u32, usize)>) {
        if word.len() == 1 {
            out.push((self.byte_ids[word[0] as usize], offset));
            return;
        }
        /// A token so far: the bytes from its own index on. `len` 0: merged into the one before.
        #[derive(Clone, Copy)]
        struct Symbol {
            id: u32,
            len: usize,
            prev: usize,
        }
        let n = word.len();
        let mut symbols: Vec<Symbol> =
            (0..n).map(|i| Symbol { id: self.byte_ids[word[i] as usize], len: 1, prev: i.wrapping_sub(1) }).collect();
        // (rank, position, merged id, its bytes): an entry whose neighbours have changed meanwhile is skipped.
        let mut heap = BinaryHeap::with_capacity(n);
        let candidate = |symbols: &[Symbol], at: usize| {
            let left = symbols[at].len;
            let right = symbols.get(at + left)?.len;
            let (rank, id) = self.merged(&word[at..at + left + right], left)?;
            Some(Reverse((rank, at, id, left, right)))
        };
        for at in 0..n - 1 {
            heap.extend(candidate(&symbols, at));
        }
        while let Some(Reverse((_, at, id, left, right))) = heap.pop() {
            if symbols[at].len != left || symbols.get(at + left).is_none_or(|s| s.len != right) {
                continue;
            }
            symbols[at + left].len = 0;
            symbols[at] = Symbol { id, len: left + right, ..symbols[at] };
            if let Some(after) = symbols.get_mut(at + left + right) {
                after.prev = at;
            }
            heap.extend(candidate(&symbols, at));
            if at > 0 {
                heap.extend(candidate(&symbols, symbols[at].prev));
            }
        }
        let mut at = 0;
        while at < n {
            out.push((symbols[at].id, offset + at));
            at += symbols[at].len;
        }
    }
}

/// The bytes of token `id`.
fn slice<'a>(bytes: &'a [u8], ends: &[u32], id: u32) -> &'a [u8] {
    let i = id as usize;
    match ends.get(i) {
        None => &[],
        Some(&end) => &bytes[if i == 0 { 0 } else { ends[i - 1] as usize }..end as usize],
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Text,
    Control,
    Unused,
}

/// GPT-2's byte-level alphabet, backwards: printable bytes stand for themselves, the others for the characters from U+0100.
fn byte_of_char() -> [Option<u8>; 512] {
    let mut table = [None; 512];
    let mut next = 256;
    for byte in 0..=255u8 {
        let printable = matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
        if printable {
            table[byte as usize] = Some(byte);
        } else {
            table[next] = Some(byte);
            next += 1;
        }
    }
    table
}

/// That alphabet in its order, which is the order of the first 256 ids of Qwen's vocabulary.
pub(super) fn byte_chars() -> impl Iterator<Item = char> {
    let table = byte_of_char();
    (0..512u32).filter(move |&code| table[code as usize].is_some()).filter_map(char::from_u32)
}

/// The parts of `tokenizer.json` that are read.
mod file {
    use serde::Deserialize;
    use std::collections::HashMap;

    #[derive(Deserialize)]
    pub struct TokenizerJson {
        #[serde(default)]
        pub added_tokens: Vec<Added>,
        #[serde(default)]
        pub normalizer: Option<serde_json::Value>,
        #[serde(default)]
        pub pre_tokenizer: serde_json::Value,
        pub model: Model,
    }

    #[derive(Deserialize)]
    pub struct Added {
        pub id: u32,
        pub content: String,
    }

    #[derive(Deserialize)]
    pub struct Model {
        #[serde(rename = "type")]
        pub kind: Option<String>,
        pub vocab: HashMap<String, u32>,
        pub merges: Vec<Merge>,
    }

    #[derive(Deserialize)]
    #[serde(untagged)]
    pub enum Merge {
        Pair((String, String)),
        Line(String),
    }
}

/// Joins bytes to text as they come and never gives out half a character. What cannot become one is U+FFFD.
#[derive(Clone, Debug, Default)]
pub struct Utf8Stream {
    pending: Vec<u8>,
}

impl Utf8Stream {
    /// The text that `bytes` completes.
    pub fn push(&mut self, bytes: &[u8]) -> String {
        self.pending.extend_from_slice(bytes);
        let mut text = String::with_capacity(self.pending.len());
        let mut rest = 0;
        let chunks = self.pending.utf8_chunks();
        let total = self.pending.len();
        for chunk in chunks {
            text.push_str(chunk.valid());
            rest += chunk.valid().len() + chunk.invalid().len();
            let broken = chunk.invalid();
            if broken.is_empty() {
                continue;
            }
            // An incomplete character at the very end can still be completed.
            if rest == total && std::str::from_utf8(broken).is_err_and(|e| e.error_len().is_none()) {
                rest -= broken.len();
                break;
            }
            text.push(char::REPLACEMENT_CHARACTER);
        }
        self.pending.drain(..rest);
        text
    }

    /// What is left at the end: nothing, or U+FFFD for a character that was never completed.
    pub fn finish(&mut self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut self.pending)).into_owned()
    }
}
