//! The numbers of a Qwen2 model, and the refusal of what is not one.

use super::gguf::{Gguf, Value};
use super::kv::{KvShape, KvType};

#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Rows of the embedding and width of the logits.
    pub vocab: usize,
    pub hidden: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub intermediate: usize,
    pub rope_theta: f64,
    pub rms_eps: f32,
    /// Whether the embedding is the output matrix too.
    pub tied: bool,
    /// Positions that the model was trained for.
    pub context: usize,
}

impl Config {
    /// The shape of a KV cache of this model.
    pub fn kv_shape(&self, kind: KvType) -> KvShape {
        KvShape { layers: self.layers, kv_heads: self.kv_heads, head_dim: self.head_dim, kind }
    }

    pub fn from_gguf(file: &Gguf) -> Result<Self, String> {
        let fail = |why: String| format!("{}: {why}", file.path().display());
        let architecture = file.str("general.architecture").unwrap_or("(none)");
        if architecture != "qwen2" {
            return Err(fail(format!("its architecture is `{architecture}`; cob runs `qwen2`")));
        }
        if let Some(parts) = file.usize("split.count").filter(|&parts| parts > 1) {
            return Err(fail(format!("it is one of {parts} parts; join them first (llama-gguf-split --merge)")));
        }
        match file.metadata().get("qwen2.rope.scaling.type") {
            Some(Value::String(kind)) if kind == "none" => {}
            Some(Value::String(kind)) => {
                return Err(fail(format!("it wants the RoPE scaling `{kind}`, which cob does not compute")));
            }
            Some(_) => return Err(fail("qwen2.rope.scaling.type is not a string: it is damaged".into())),
            // A factor alone means linear scaling.
            None => match file.metadata().get("qwen2.rope.scaling.factor") {
                None | Some(Value::Float(1.0)) => {}
                Some(_) => {
                    return Err(fail(
                        "it has a qwen2.rope.scaling.factor, and cob does not compute RoPE scaling".into(),
                    ));
                }
            },
        }
        if let Some(experts) = file.usize("qwen2.expert_count").filter(|&experts| experts > 0) {
            return Err(fail(format!("it has {experts} experts, which cob does not compute")));
        }
        if let Some(window) = file.usize("qwen2.attention.sliding_window").filter(|&w| w > 0) {
            return Err(fail(format!("it wants a sliding window of {window}, which cob does not compute")));
        }
        let get = |key: &str| {
            file.usize(&format!("qwen2.{key}")).ok_or_else(|| fail(format!("qwen2.{key} is missing or not a number")))
        };
        let float = |key: &str| match file.metadata().get(&format!("qwen2.{key}")) {
            Some(Value::Float(x)) => Ok(*x),
            Some(Value::Unsigned(x)) => Ok(*x as f64),
            _ => Err(fail(format!("qwen2.{key} is missing or not a number"))),
        };
        let (hidden, heads) = (get("embedding_length")?, get("attention.head_count")?);
        if heads == 0 {
            return Err(fail("it has no attention heads".into()));
        }
        let (layers, head_dim) = (get("block_count")?, file.usize("qwen2.attention.key_length"));
        let head_dim = head_dim.unwrap_or(hidden / heads);
        let layer_of = |name: &str| name.strip_prefix("blk.")?.split('.').next()?.parse::<usize>().ok();
        if let Some(last) = file.tensors().keys().filter_map(|name| layer_of(name)).max().filter(|&last| last >= layers)
        {
            let held = last.saturating_add(1);
            return Err(fail(format!("qwen2.block_count is {layers}, and it holds {held} layers: it is damaged")));
        }
        if let Some(rotated) = file.usize("qwen2.rope.dimension_count").filter(|&rotated| rotated != head_dim) {
            return Err(fail(format!("it rotates {rotated} of {head_dim} elements of a head; cob rotates all")));
        }
        let vocab = file.raw("token_embd.weight")?.n;
        Config {
            vocab,
            hidden,
            layers,
            heads,
            kv_heads: get("attention.head_count_kv")?,
            head_dim,
            intermediate: get("feed_forward_length")?,
            rope_theta: float("rope.freq_base")?,
            rms_eps: float("attention.layer_norm_rms_epsilon")? as f32,
            // The format has no word for it: a file without an output matrix is a tied model.
            tied: !file.tensors().contains_key("output.weight"),
            context: get("context_length")?,
        }
        .checked()
        .map_err(fail)
    }

    /// From a Hugging Face `config.json`.
    pub fn from_json(text: &str) -> Result<Self, String> {
        let json: serde_json::Value = serde_json::from_str(text).map_err(|e| format!("config.json: {e}"))?;
        let kind = json["model_type"].as_str().unwrap_or("(none)");
        if kind != "qwen2" {
            return Err(format!("config.json: the model is a `{kind}`; cob runs `qwen2`"));
        }
        if json["use_sliding_window"].as_bool() == Some(true) {
            return Err("config.json: use_sliding_window is on, which cob does not compute".into());
        }
        // Newer files say `rope_type`, older ones `type`, and some both.
        let scaling = &json["rope_scaling"];
        let mut kinds = ["rope_type", "type"].iter().map(|key| &scaling[key]).filter(|kind| !kind.is_null()).peekable();
        if !scaling.is_null() && (kinds.peek().is_none() || kinds.any(|kind| kind != "default")) {
            return Err(format!("config.json: rope_scaling {scaling} is one that cob does not compute"));
        }
        if let Some(act) = json["hidden_act"].as_str().filter(|&act| act != "silu") {
            return Err(format!("config.json: hidden_act `{act}` is one that cob does not compute"));
        }
        let get = |key: &str| {
            json[key]
                .as_u64()
                .and_then(|x| usize::try_from(x).ok())
                .ok_or_else(|| format!("config.json: {key} is missing or not a number"))
        };
        let float =
            |key: &str| json[key].as_f64().ok_or_else(|| format!("config.json: {key} is missing or not a number"));
        let (hidden, heads) = (get("hidden_size")?, get("num_attention_heads")?);
        if heads == 0 {
            return Err("config.json: there are no attention heads".into());
        }
        Config {
            vocab: get("vocab_size")?,
            hidden,
            layers: get("num_hidden_layers")?,
            heads,
            kv_heads: get("num_key_value_heads")?,
            head_dim: get("head_dim").unwrap_or(hidden / heads),
            intermediate: get("intermediate_size")?,
            rope_theta: float("rope_theta")?,
            rms_eps: float("rms_norm_eps")? as f32,
            // Qwen2's default in transformers; the small Qwen2.5 say that they are.
            tied: json["tie_word_embeddings"].as_bool().unwrap_or(false),
            context: get("max_position_embeddings")?,
        }
        .checked()
    }

    fn checked(self) -> Result<Self, String> {
        let Config { vocab, hidden, layers, heads, kv_heads, head_dim, intermediate, context, .. } = self;
        let sizes = [
            ("vocabulary", vocab),
            ("hidden size", hidden),
            ("layers", layers),
            ("KV heads", kv_heads),
            ("intermediate size", intermediate),
            ("context", context),
        ];
        for (name, size) in sizes {
            if size == 0 || size > 1 << 24 {
                return Err(format!("its {name} is {size}, which cannot be"));
            }
        }
        if !heads.is_multiple_of(kv_heads) || heads / kv_heads > 8 {
            return Err(format!("{heads} query heads over {kv_heads} KV heads: cob shares a KV head among 1 to 8"));
        }
        if !head_dim.is_multiple_of(16) || head_dim == 0 || head_dim > 256 {
            return Err(format!("heads of {head_dim} elements: cob computes multiples of 16 up to 256"));
        }
        if !hidden.is_multiple_of(8) || !intermediate.is_multiple_of(8) {
            return Err(format!("hidden size {hidden}, intermediate size {intermediate}: cob computes multiples of 8"));
        }
        if !(self.rope_theta > 1.0 && self.rope_theta.is_finite() && self.rms_eps >= 0.0 && self.rms_eps.is_finite()) {
            return Err(format!("rope_theta {} or rms_eps {} cannot be", self.rope_theta, self.rms_eps));
        }
        Ok(self)
    }
}
