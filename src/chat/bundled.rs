//! Qwen2.5's tokenizer and chat template, built into the program: enough to count tokens where no model is.
//!
//! `qwen2.5.zip` holds `merges.txt` and `chat_template.jinja` as they are in Qwen2.5-Coder-0.5B-Instruct (Apache-2.0). The
//! vocabulary follows from the merges: the 256 bytes, then what each merge makes, then the control tokens.

use std::io::{Cursor, Read};
use std::sync::Arc;

use super::template::Template;
use super::tokenizer::{Tokenizer, byte_chars, token_type};

static ARCHIVE: &[u8] = include_bytes!("qwen2.5.zip");

/// What the counts of this tokenizer are said to come from.
pub const NAME: &str = "Qwen2.5 (built in)";

/// The context that Qwen2.5's smaller models were made for.
pub const CONTEXT_TOKENS: usize = 32_768;

const CONTROLS: [&str; 22] = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
];

/// The template with its tokenizer. Takes about 50 ms; an error means that the program itself is damaged.
pub fn template() -> Result<Template, String> {
    let (merges, source) = (entry("merges.txt")?, entry("chat_template.jinja")?);
    let merges: Vec<&str> = merges.lines().collect();
    let bytes = byte_chars().map(String::from);
    let made = merges.iter().map(|merge| merge.replace(' ', ""));
    let tokens: Vec<String> = bytes.chain(made).chain(CONTROLS.map(String::from)).collect();
    let text = tokens.len() - CONTROLS.len();
    let kind = |at: usize| if at < text { token_type::NORMAL } else { token_type::CONTROL };
    let types: Vec<i32> = (0..tokens.len()).map(kind).collect();
    let merges: Vec<String> = merges.into_iter().map(str::to_owned).collect();
    let tokenizer = Tokenizer::from_vocab(&tokens, &merges, &types, "qwen2").map_err(|error| error.to_string())?;
    Template::new(&source, Arc::new(tokenizer)).map_err(|error| error.to_string())
}

fn entry(name: &str) -> Result<String, String> {
    let fault = |error: &dyn std::fmt::Display| format!("the built-in tokenizer: {name}: {error}");
    let mut archive = zip::ZipArchive::new(Cursor::new(ARCHIVE)).map_err(|error| fault(&error))?;
    let mut text = String::new();
    archive.by_name(name).map_err(|error| fault(&error))?.read_to_string(&mut text).map_err(|error| fault(&error))?;
    Ok(text)
}
