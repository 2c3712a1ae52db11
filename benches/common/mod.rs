//! What the benches share: the real model when it is installed, and a random one of the same shape when not.

// Each bench uses a part of it.
#![allow(dead_code)]

use std::path::{Path, PathBuf};

use candle_core::Device;
use candle_core::quantized::{GgmlDType, QStorage, QTensor, gguf_file};
use cob::message::ToolSpec;
use serde_json::json;

pub const MODEL: &str = "qwen2.5-coder-0.5b-instruct-q4_k_m";

/// The real 0.5B file, or a random one written to a temporary folder that lives as long as the second value.
pub fn model() -> (PathBuf, Option<tempfile::TempDir>) {
    let var = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let folder = var("COB_HOME")
        .map(|home| home.join("models"))
        .or_else(|| var("XDG_CACHE_HOME").map(|cache| cache.join("cob/models")))
        .or_else(|| var("HOME").map(|home| home.join(".cache/cob/models")))
        .unwrap_or_default();
    let file = folder.join(format!("{MODEL}.gguf"));
    if file.is_file() {
        println!("model: the real {}", file.display());
        return (file, None);
    }
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("random.gguf");
    write_random(&file);
    println!("model: RANDOM weights in the shape of {MODEL}, which is not installed (`cob model pull {MODEL}`)");
    (file, Some(folder))
}

/// Weights of the 0.5B shape in the types of its Q4_K_M file. Blocks are noise with small scales: speed does not depend on
/// what the numbers are.
pub fn write_random(path: &Path) {
    use gguf_file::Value as V;
    let (vocab, hidden, layers, kv, inner) = (151_936, 896, 24, 128, 4864);
    let n = |x: usize| V::U32(x as u32);
    let metadata = [
        ("general.architecture", V::String("qwen2".into())),
        ("qwen2.block_count", n(layers)),
        ("qwen2.embedding_length", n(hidden)),
        ("qwen2.feed_forward_length", n(inner)),
        ("qwen2.attention.head_count", n(14)),
        ("qwen2.attention.head_count_kv", n(2)),
        ("qwen2.rope.freq_base", V::F32(1e6)),
        ("qwen2.attention.layer_norm_rms_epsilon", V::F32(1e-6)),
        ("qwen2.context_length", n(32_768)),
    ];
    let mut tensors: Vec<(String, QTensor)> = Vec::new();
    let mut add = |name: String, shape: &[usize], kind: GgmlDType| {
        let blocks = shape.iter().product::<usize>() / kind.block_size();
        let mut bytes = vec![0u8; blocks * kind.type_size()];
        let mut state = 0x9E37_79B9_7F4A_7C15u64 ^ bytes.len() as u64;
        for byte in &mut bytes {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            *byte = (state >> 56) as u8;
        }
        let small = half::f16::from_f32(0.001).to_le_bytes();
        let one = 1f32.to_le_bytes();
        for block in bytes.chunks_exact_mut(kind.type_size()) {
            match kind {
                GgmlDType::F32 => block.copy_from_slice(&one),
                GgmlDType::Q6K => block[208..].copy_from_slice(&small),
                GgmlDType::Q4K => {
                    block[..2].copy_from_slice(&small);
                    block[2..4].copy_from_slice(&small);
                }
                _ => block[..2].copy_from_slice(&small),
            }
        }
        let storage = QStorage::from_data(bytes.into(), &Device::Cpu, kind).expect("a tensor");
        tensors.push((name, QTensor::new(storage, shape).expect("a tensor")));
    };
    add("token_embd.weight".into(), &[vocab, hidden], GgmlDType::Q8_0);
    add("output_norm.weight".into(), &[hidden], GgmlDType::F32);
    for i in 0..layers {
        let half = i % 2 == 0;
        for (name, shape, kind) in [
            ("attn_norm.weight", &[hidden][..], GgmlDType::F32),
            ("attn_q.weight", &[hidden, hidden], GgmlDType::Q5_0),
            ("attn_q.bias", &[hidden], GgmlDType::F32),
            ("attn_k.weight", &[kv, hidden], GgmlDType::Q5_0),
            ("attn_k.bias", &[kv], GgmlDType::F32),
            ("attn_v.weight", &[kv, hidden], if half { GgmlDType::Q8_0 } else { GgmlDType::Q5_0 }),
            ("attn_v.bias", &[kv], GgmlDType::F32),
            ("attn_output.weight", &[hidden, hidden], GgmlDType::Q5_0),
            ("ffn_norm.weight", &[hidden], GgmlDType::F32),
            ("ffn_gate.weight", &[inner, hidden], GgmlDType::Q5_0),
            ("ffn_up.weight", &[inner, hidden], GgmlDType::Q5_0),
            ("ffn_down.weight", &[hidden, inner], if half { GgmlDType::Q6K } else { GgmlDType::Q4K }),
        ] {
            add(format!("blk.{i}.{name}"), shape, kind);
        }
    }
    let words = words(vocab);
    let metadata: Vec<(&str, &V)> = metadata.iter().chain(&words).map(|(k, v)| (*k, v)).collect();
    let tensors: Vec<(&str, &QTensor)> = tensors.iter().map(|(k, v)| (k.as_str(), v)).collect();
    let mut file = std::fs::File::create(path).expect("the file can be made");
    gguf_file::write(&mut file, &metadata, &tensors).expect("the file can be written");
}

/// A vocabulary of the real one's size, of made-up words: what a mask costs depends on how many tokens there are and how long.
fn words(vocab: usize) -> Vec<(&'static str, gguf_file::Value)> {
    use gguf_file::Value as V;
    let controls = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"];
    // The bytes, each as the visible character that stands for it in such vocabularies.
    let visible = |byte: u8| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    let mut hidden = 256..;
    let mut tokens: Vec<String> = (0..=255u8)
        .map(|byte| if visible(byte) { u32::from(byte) } else { hidden.next().expect("endless") })
        .map(|code| char::from_u32(code).expect("a character").to_string())
        .collect();
    let mut known: std::collections::HashSet<String> = tokens.iter().cloned().collect();
    // Words grow from letters, some of them behind a space.
    let mut parts: Vec<String> = ('a'..='z').map(String::from).chain(["\u{120}".into()]).collect();
    let mut merges = Vec::new();
    let mut state = 1u64;
    let mut below = |n: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % n
    };
    while tokens.len() + controls.len() < vocab {
        let (left, right) = (parts[below(parts.len())].clone(), parts[below(parts.len())].clone());
        let word = format!("{left}{right}");
        if word.chars().count() > 10 || right.starts_with('\u{120}') || !known.insert(word.clone()) {
            continue;
        }
        merges.push(V::String(format!("{left} {right}")));
        tokens.push(word.clone());
        parts.push(word);
    }
    let types = tokens.iter().map(|_| V::I32(1)).chain(controls.iter().map(|_| V::I32(3))).collect();
    tokens.extend(controls.map(String::from));
    vec![
        ("tokenizer.ggml.model", V::String("gpt2".into())),
        ("tokenizer.ggml.pre", V::String("qwen2".into())),
        ("tokenizer.ggml.tokens", V::Array(tokens.into_iter().map(V::String).collect())),
        ("tokenizer.ggml.token_type", V::Array(types)),
        ("tokenizer.ggml.merges", V::Array(merges)),
        ("tokenizer.chat_template", V::String("{{ messages[0].content }}".into())),
    ]
}

/// The `i`-th tool of five described parameters.
pub fn tool(i: usize) -> ToolSpec {
    ToolSpec {
        name: format!("search_tickets_{i}"),
        description: "Search the ticket system and return the matching tickets, newest first. Use it when the user asks about bugs, requests or incidents.".into(),
        parameters: json!({"type": "object", "properties": {
            "query": {"type": "string", "description": "Words to search for in titles and bodies"},
            "status": {"type": "string", "enum": ["open", "closed", "all"], "description": "Which tickets to include"},
            "assignee": {"type": "string", "description": "Login of the person the ticket is assigned to"},
            "limit": {"type": "integer", "description": "How many tickets to return at most"},
            "include_comments": {"type": "boolean", "description": "Whether comments are returned as well"},
        }, "required": ["query"], "additionalProperties": false}),
    }
}

pub fn tools(n: usize) -> Vec<ToolSpec> {
    (0..n).map(tool).collect()
}

/// A skill as it stands in a system prompt.
pub fn skill_line(i: usize) -> String {
    format!(
        "- new-blog-post-{i}: Write and publish a new post for the blog (source and translation, series entry, tests). Use when asked to write, translate or publish a post.\n"
    )
}
