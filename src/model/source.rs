//! Where weights come from: one GGUF file, or a folder with `config.json` and safetensors.

use std::path::{Path, PathBuf};

use candle_core::safetensors::MmapedSafetensors;

use super::candle_error;
use super::config::Config;
use super::gguf::{Gguf, Raw};
use super::weight::WeightType;

pub enum Source {
    Gguf(Gguf),
    Safetensors { folder: PathBuf, files: MmapedSafetensors },
}

/// See [`Source::tensor_types`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorType {
    pub name: String,
    pub tensors: usize,
    pub elements: usize,
}

/// A tensor of the model, under the name that its file gives it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Name {
    Embedding,
    OutputNorm,
    Output,
    AttentionNorm(usize),
    Query(usize),
    QueryBias(usize),
    Key(usize),
    KeyBias(usize),
    Value(usize),
    ValueBias(usize),
    AttentionOutput(usize),
    MlpNorm(usize),
    Gate(usize),
    Up(usize),
    Down(usize),
}

impl Name {
    fn gguf(self) -> String {
        use Name::*;
        let (layer, name) = match self {
            Embedding => return "token_embd.weight".into(),
            OutputNorm => return "output_norm.weight".into(),
            Output => return "output.weight".into(),
            AttentionNorm(i) => (i, "attn_norm.weight"),
            Query(i) => (i, "attn_q.weight"),
            QueryBias(i) => (i, "attn_q.bias"),
            Key(i) => (i, "attn_k.weight"),
            KeyBias(i) => (i, "attn_k.bias"),
            Value(i) => (i, "attn_v.weight"),
            ValueBias(i) => (i, "attn_v.bias"),
            AttentionOutput(i) => (i, "attn_output.weight"),
            MlpNorm(i) => (i, "ffn_norm.weight"),
            Gate(i) => (i, "ffn_gate.weight"),
            Up(i) => (i, "ffn_up.weight"),
            Down(i) => (i, "ffn_down.weight"),
        };
        format!("blk.{layer}.{name}")
    }

    fn safetensors(self) -> String {
        use Name::*;
        let (layer, name) = match self {
            Embedding => return "model.embed_tokens.weight".into(),
            OutputNorm => return "model.norm.weight".into(),
            Output => return "lm_head.weight".into(),
            AttentionNorm(i) => (i, "input_layernorm.weight"),
            Query(i) => (i, "self_attn.q_proj.weight"),
            QueryBias(i) => (i, "self_attn.q_proj.bias"),
            Key(i) => (i, "self_attn.k_proj.weight"),
            KeyBias(i) => (i, "self_attn.k_proj.bias"),
            Value(i) => (i, "self_attn.v_proj.weight"),
            ValueBias(i) => (i, "self_attn.v_proj.bias"),
            AttentionOutput(i) => (i, "self_attn.o_proj.weight"),
            MlpNorm(i) => (i, "post_attention_layernorm.weight"),
            Gate(i) => (i, "mlp.gate_proj.weight"),
            Up(i) => (i, "mlp.up_proj.weight"),
            Down(i) => (i, "mlp.down_proj.weight"),
        };
        format!("model.layers.{layer}.{name}")
    }
}

/// What `config.json` of a folder says.
fn folder_config(folder: &Path) -> Result<Config, String> {
    let path = folder.join("config.json");
    let text = std::fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
    Config::from_json(&text).map_err(|why| format!("{}: {why}", folder.display()))
}

impl Source {
    /// Opens a GGUF file, or a folder with `config.json` and one or more `*.safetensors`. Reads headers only.
    pub fn open(path: &Path) -> Result<Self, String> {
        if !path.is_dir() {
            return Gguf::open(path).map(Source::Gguf);
        }
        let fail = |why: String| format!("{}: {why}", path.display());
        let entries = std::fs::read_dir(path).map_err(|e| fail(e.to_string()))?;
        let mut files: Vec<PathBuf> = entries
            .filter_map(|entry| entry.ok().map(|entry| entry.path()))
            .filter(|p| p.extension().is_some_and(|e| e == "safetensors"))
            .collect();
        files.sort();
        if files.is_empty() {
            return Err(fail("there is no *.safetensors in this folder".into()));
        }
        // What cannot be run is named before what cannot be read.
        folder_config(path)?;
        // SAFETY: as for a mapped GGUF file.
        let files = unsafe { MmapedSafetensors::multi(&files) };
        let files = files.map_err(|e| format!("bad safetensors: {}", candle_error(&e)))?;
        Ok(Source::Safetensors { folder: path.to_owned(), files })
    }

    pub fn config(&self) -> Result<Config, String> {
        match self {
            Source::Gguf(file) => Config::from_gguf(file),
            Source::Safetensors { folder, .. } => {
                let config = folder_config(folder)?;
                if !config.tied && !self.has(Name::Output) {
                    let why = missing(folder, &self.name(Name::Output));
                    return Err(format!("{why} (config.json: tie_word_embeddings is not true)"));
                }
                Ok(config)
            }
        }
    }

    fn path(&self) -> &Path {
        match self {
            Source::Gguf(file) => file.path(),
            Source::Safetensors { folder, .. } => folder,
        }
    }

    /// Each type of tensor in the file, also those that we do not compute, with the number of its tensors and of their elements;
    /// the commonest first.
    pub fn tensor_types(&self) -> Vec<TensorType> {
        let tensors: Vec<(String, usize)> = match self {
            Source::Gguf(file) => {
                let name =
                    |id| WeightType::from_ggml(id).map_or_else(|| format!("type {id}"), |kind| kind.name().into());
                file.tensors().values().map(|t| (name(t.ggml_type), t.shape.iter().product())).collect()
            }
            Source::Safetensors { files, .. } => {
                let tensors = files.tensors();
                tensors.iter().map(|(_, t)| (format!("{:?}", t.dtype()), t.shape().iter().product())).collect()
            }
        };
        let mut types: Vec<TensorType> = Vec::new();
        for (name, elements) in tensors {
            match types.iter_mut().find(|known| known.name == name) {
                Some(known) => (known.tensors, known.elements) = (known.tensors + 1, known.elements + elements),
                None => types.push(TensorType { name, tensors: 1, elements }),
            }
        }
        types.sort_by(|a, b| b.elements.cmp(&a.elements).then(a.name.cmp(&b.name)));
        types
    }

    fn name(&self, name: Name) -> String {
        match self {
            Source::Gguf(_) => name.gguf(),
            Source::Safetensors { .. } => name.safetensors(),
        }
    }

    pub(crate) fn has(&self, name: Name) -> bool {
        let name = self.name(name);
        match self {
            Source::Gguf(file) => file.tensors().contains_key(&name),
            Source::Safetensors { files, .. } => files.get(&name).is_ok(),
        }
    }

    /// The tensor, which must have this shape (`n` = 1 for a vector).
    pub(crate) fn raw(&self, name: Name, n: usize, k: usize) -> Result<Raw<'_>, String> {
        let name = self.name(name);
        let raw = match self {
            Source::Gguf(file) => file.raw(&name)?,
            Source::Safetensors { folder, files } => {
                let fail = |why: String| format!("{}: tensor {name}: {why}", folder.display());
                let view = files.get(&name).map_err(|_| missing(folder, &name))?;
                let kind = match view.dtype() {
                    safetensors::Dtype::F32 => WeightType::F32,
                    safetensors::Dtype::F16 => WeightType::F16,
                    safetensors::Dtype::BF16 => WeightType::BF16,
                    other => return Err(fail(format!("{other:?} is not a type that cob computes (F32, F16, BF16)"))),
                };
                let (n, k) = match *view.shape() {
                    [k] => (1, k),
                    [n, k] => (n, k),
                    ref other => return Err(fail(format!("it has the shape {other:?}"))),
                };
                Raw { kind, n, k, bytes: view.data() }
            }
        };
        if (raw.n, raw.k) != (n, k) {
            let (path, found) = (self.path().display(), [raw.n, raw.k]);
            return Err(format!("{path}: tensor {name} is {found:?} and should be [{n}, {k}]"));
        }
        Ok(raw)
    }

    /// A vector as f32.
    pub(crate) fn vector(&self, name: Name, k: usize) -> Result<Vec<f32>, String> {
        let raw = self.raw(name, 1, k)?;
        let mut out = vec![0.0; k];
        raw.kind.dequantize(raw.bytes, &mut out);
        Ok(out)
    }

    pub(crate) fn release(&self, raw: &Raw) {
        if let Source::Gguf(file) = self {
            file.release(raw);
        }
    }
}

/// What to say of a tensor that no file of the folder has; the index, where there is one, knows the file that is missing.
fn missing(folder: &Path, tensor: &str) -> String {
    const INDEX: &str = "model.safetensors.index.json";
    let index = std::fs::read(folder.join(INDEX)).ok();
    let index: Option<serde_json::Value> = index.and_then(|text| serde_json::from_slice(&text).ok());
    let shard = index.as_ref().and_then(|index| index["weight_map"][tensor].as_str());
    let place = match shard {
        Some(shard) if !folder.join(shard).is_file() => {
            format!("{INDEX} has it in {shard}, which is not in the folder; fetch that file")
        }
        _ => "no *.safetensors of the folder has it; fetch the model again".into(),
    };
    format!("{}: tensor {tensor} is missing: {place}", folder.display())
}
