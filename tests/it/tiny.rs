//! Small random Qwen2 models, written to files as real ones are.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use candle_core::quantized::{GgmlDType, QTensor, gguf_file};
use candle_core::{DType, Device, Tensor};

/// The shape of a test model.
#[derive(Clone, Copy)]
pub struct Shape {
    pub vocab: usize,
    pub hidden: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub intermediate: usize,
    pub tied: bool,
}

pub const SMALL: Shape =
    Shape { vocab: 301, hidden: 256, layers: 3, heads: 4, kv_heads: 2, intermediate: 512, tied: false };

/// Reproducible values, roughly normal, with this standard deviation.
pub fn noise(seed: u64, n: usize, deviation: f32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut uniform = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    // Four uniforms of variance 1/12 each.
    (0..n).map(|_| (uniform() + uniform() + uniform() + uniform()) * deviation * 1.732).collect()
}

/// (Hugging Face's name, GGUF's name, shape) of every tensor.
fn tensors(s: &Shape) -> Vec<(String, String, Vec<usize>)> {
    let dim = s.hidden / s.heads;
    let kv = s.kv_heads * dim;
    let mut out = vec![
        ("model.embed_tokens.weight".into(), "token_embd.weight".into(), vec![s.vocab, s.hidden]),
        ("model.norm.weight".into(), "output_norm.weight".into(), vec![s.hidden]),
    ];
    if !s.tied {
        out.push(("lm_head.weight".into(), "output.weight".into(), vec![s.vocab, s.hidden]));
    }
    for i in 0..s.layers {
        for (hf, gguf, shape) in [
            ("input_layernorm.weight", "attn_norm.weight", vec![s.hidden]),
            ("self_attn.q_proj.weight", "attn_q.weight", vec![s.hidden, s.hidden]),
            ("self_attn.q_proj.bias", "attn_q.bias", vec![s.hidden]),
            ("self_attn.k_proj.weight", "attn_k.weight", vec![kv, s.hidden]),
            ("self_attn.k_proj.bias", "attn_k.bias", vec![kv]),
            ("self_attn.v_proj.weight", "attn_v.weight", vec![kv, s.hidden]),
            ("self_attn.v_proj.bias", "attn_v.bias", vec![kv]),
            ("self_attn.o_proj.weight", "attn_output.weight", vec![s.hidden, s.hidden]),
            ("post_attention_layernorm.weight", "ffn_norm.weight", vec![s.hidden]),
            ("mlp.gate_proj.weight", "ffn_gate.weight", vec![s.intermediate, s.hidden]),
            ("mlp.up_proj.weight", "ffn_up.weight", vec![s.intermediate, s.hidden]),
            ("mlp.down_proj.weight", "ffn_down.weight", vec![s.hidden, s.intermediate]),
        ] {
            out.push((format!("model.layers.{i}.{hf}"), format!("blk.{i}.{gguf}"), shape));
        }
    }
    out
}

fn value(seed: u64, i: usize, shape: &[usize]) -> Tensor {
    let n = shape.iter().product();
    let mut data = noise(seed + i as u64, n, 0.05);
    if shape.len() == 1 {
        data.iter_mut().for_each(|x| *x += 1.0);
    }
    Tensor::from_vec(data, shape, &Device::Cpu).unwrap()
}

/// Writes `config.json` and the weights in two shards, in f32.
pub fn write_safetensors(folder: &Path, s: &Shape, seed: u64) {
    write_safetensors_as(folder, s, seed, DType::F32);
}

/// The same in another type.
pub fn write_safetensors_as(folder: &Path, s: &Shape, seed: u64, dtype: DType) {
    let config = serde_json::json!({
        "model_type": "qwen2", "vocab_size": s.vocab, "hidden_size": s.hidden, "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads, "num_key_value_heads": s.kv_heads, "intermediate_size": s.intermediate,
        "rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "hidden_act": "silu",
        "tie_word_embeddings": s.tied, "use_sliding_window": false, "sliding_window": 2048, "max_window_layers": 99,
    });
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let mut shards = [HashMap::new(), HashMap::new()];
    for (i, (hf, _, shape)) in tensors(s).into_iter().enumerate() {
        let tensor = value(seed, i, &shape).to_dtype(dtype).unwrap();
        shards[i % 2].insert(hf, tensor);
    }
    for (i, shard) in shards.iter().enumerate() {
        candle_core::safetensors::save(shard, folder.join(format!("model-0000{}-of-00002.safetensors", i + 1)))
            .unwrap();
    }
}

/// Writes a GGUF file with all matrices in one type (those whose rows do not divide into its blocks stay f32).
pub fn write_gguf(path: &Path, s: &Shape, seed: u64, kind: GgmlDType) -> PathBuf {
    write_gguf_with(path, s, seed, kind, &[])
}

/// As [`write_gguf`], with metadata besides or instead of its own.
pub fn write_gguf_with(
    path: &Path,
    s: &Shape,
    seed: u64,
    kind: GgmlDType,
    other: &[(&str, gguf_file::Value)],
) -> PathBuf {
    use gguf_file::Value as V;
    let n = |x: usize| V::U32(x as u32);
    let metadata = [
        ("general.architecture", V::String("qwen2".into())),
        ("qwen2.block_count", n(s.layers)),
        ("qwen2.embedding_length", n(s.hidden)),
        ("qwen2.feed_forward_length", n(s.intermediate)),
        ("qwen2.attention.head_count", n(s.heads)),
        ("qwen2.attention.head_count_kv", n(s.kv_heads)),
        ("qwen2.rope.freq_base", V::F32(1e6)),
        ("qwen2.attention.layer_norm_rms_epsilon", V::F32(1e-6)),
        ("qwen2.context_length", n(2048)),
    ];
    let tensors: Vec<(String, QTensor)> = tensors(s)
        .into_iter()
        .enumerate()
        .map(|(i, (_, gguf, shape))| {
            let fits = shape.len() == 2 && shape[1].is_multiple_of(kind.block_size());
            let kind = if fits { kind } else { GgmlDType::F32 };
            (gguf, QTensor::quantize(&value(seed, i, &shape), kind).unwrap())
        })
        .collect();
    let others = |key: &str| other.iter().any(|(k, _)| *k == key);
    let metadata = metadata.iter().filter(|(k, _)| !others(k)).chain(other);
    let metadata: Vec<(&str, &V)> = metadata.map(|(k, v)| (*k, v)).collect();
    let tensors: Vec<(&str, &QTensor)> = tensors.iter().map(|(k, v)| (k.as_str(), v)).collect();
    gguf_file::write(&mut std::fs::File::create(path).unwrap(), &metadata, &tensors).unwrap();
    path.to_owned()
}
