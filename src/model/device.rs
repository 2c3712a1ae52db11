//! Qwen2 on candle's tensors: the path of CUDA and Metal, and on the CPU the naive oracle of our own kernels.

use std::borrow::Cow;

use candle_core::quantized::{QMatMul, QStorage, QTensor};
use candle_core::{D, DType, Device, Module, Tensor};

use super::config::Config;
use super::kv::{Kv, KvShape, KvType};
use super::source::{Name, Source};
use super::{Error, Logits, Part, candle_error};

type Result<T, E = candle_core::Error> = std::result::Result<T, E>;

pub(crate) struct DeviceModel {
    config: Config,
    source: Source,
    device: Device,
    kv_type: KvType,
    layers: Vec<Layer>,
    norm: Tensor,
    head: Weight,
}

struct Layer {
    attention_norm: Tensor,
    /// Query, key, value, with their biases.
    qkv: [(Weight, Tensor); 3],
    output: Weight,
    mlp_norm: Tensor,
    gate: Weight,
    up: Weight,
    down: Weight,
}

/// What a CUDA device has left; the driver's figure is of the device that this thread made last.
pub(super) fn free_bytes(device: &Device) -> Option<u64> {
    #[cfg(feature = "cuda")]
    if device.is_cuda() {
        return candle_core::cuda_backend::cudarc::driver::result::mem_get_info().ok().map(|(free, _)| free as u64);
    }
    let _ = device;
    None
}

/// A matrix `[n, k]`.
enum Weight {
    Quantized(QMatMul),
    /// Transposed, `[k, n]`, in its own type; the activations are brought to that type for the product.
    Float(Tensor),
}

impl Weight {
    /// `x`: [rows, k] f32 → [rows, n] f32.
    fn apply(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Weight::Quantized(w) => w.forward(x),
            Weight::Float(w) => x.to_dtype(w.dtype())?.matmul(w)?.to_dtype(DType::F32),
        }
    }
}

impl DeviceModel {
    /// `exact`: every matrix is dequantised to f32, the definition of the file's meaning (and four times its memory).
    pub fn load(source: Source, config: Config, device: Device, kv_type: KvType, exact: bool) -> Result<Self, String> {
        if kv_type == KvType::Q8_0 {
            return Err("keys and values of type q8_0 are for the CPU only; use f16 (--kv-type f16)".into());
        }
        let c = &config;
        let fail = |e: candle_core::Error| format!("the weights do not go to the device: {}", candle_error(&e));
        let matrix = |name: Name, n: usize, k: usize| -> Result<Weight, String> {
            let raw = source.raw(name, n, k)?;
            let load = || -> Result<Weight> {
                if exact || raw.kind.is_float() {
                    let dtype = match raw.kind {
                        super::weight::WeightType::F16 if !exact => DType::F16,
                        super::weight::WeightType::BF16 if !exact => DType::BF16,
                        _ => DType::F32,
                    };
                    let mut values = vec![0f32; n * k];
                    let row_bytes = raw.kind.row_bytes(k);
                    for (row, out) in raw.bytes.chunks_exact(row_bytes).zip(values.chunks_exact_mut(k)) {
                        raw.kind.dequantize(row, out);
                    }
                    let tensor = Tensor::from_vec(values, (n, k), &Device::Cpu)?.to_dtype(dtype)?;
                    return Ok(Weight::Float(tensor.to_device(&device)?.t()?));
                }
                let storage = QStorage::from_data(Cow::Borrowed(raw.bytes), &device, raw.kind.ggml_dtype())?;
                Ok(Weight::Quantized(QMatMul::from_qtensor(QTensor::new(storage, (n, k))?)?))
            };
            let weight = load().map_err(fail)?;
            source.release(&raw);
            Ok(weight)
        };
        let vector = |name: Name, k: usize| -> Result<Tensor, String> {
            Tensor::from_vec(source.vector(name, k)?, k, &device).map_err(fail)
        };
        let (q, kv) = (c.heads * c.head_dim, c.kv_heads * c.head_dim);
        let mut layers = Vec::with_capacity(c.layers);
        for i in 0..c.layers {
            layers.push(Layer {
                attention_norm: vector(Name::AttentionNorm(i), c.hidden)?,
                qkv: [
                    (matrix(Name::Query(i), q, c.hidden)?, vector(Name::QueryBias(i), q)?),
                    (matrix(Name::Key(i), kv, c.hidden)?, vector(Name::KeyBias(i), kv)?),
                    (matrix(Name::Value(i), kv, c.hidden)?, vector(Name::ValueBias(i), kv)?),
                ],
                output: matrix(Name::AttentionOutput(i), c.hidden, q)?,
                mlp_norm: vector(Name::MlpNorm(i), c.hidden)?,
                gate: matrix(Name::Gate(i), c.intermediate, c.hidden)?,
                up: matrix(Name::Up(i), c.intermediate, c.hidden)?,
                down: matrix(Name::Down(i), c.hidden, c.intermediate)?,
            });
        }
        let norm = vector(Name::OutputNorm, c.hidden)?;
        let head = if source.has(Name::Output) { Name::Output } else { Name::Embedding };
        let head = matrix(head, c.vocab, c.hidden)?;
        Ok(DeviceModel { source, device, kv_type, layers, norm, head, config })
    }

    pub fn kv_shape(&self) -> KvShape {
        self.config.kv_shape(self.kv_type)
    }

    pub fn device(&self) -> &Device {
        &self.device
    }

    /// One sequence after the other.
    pub fn forward_batch(&mut self, parts: &mut [Part], cancelled: &dyn Fn() -> bool) -> Result<Vec<Vec<f32>>, Error> {
        let mut out = Vec::with_capacity(parts.len());
        for i in 0..parts.len() {
            match self.forward(parts[i].kv, parts[i].ids, parts[i].logits, cancelled) {
                Ok(logits) => out.push(logits),
                Err(error) => {
                    for part in &mut parts[..i] {
                        part.kv.truncate(part.kv.len() - part.ids.len());
                    }
                    return Err(error);
                }
            }
        }
        Ok(out)
    }

    fn forward(
        &mut self,
        kv: &mut Kv,
        ids: &[u32],
        logits: Logits,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Vec<f32>, Error> {
        match self.pass(kv, ids, logits, cancelled) {
            Ok(Some(logits)) => {
                kv.advance(ids.len());
                Ok(logits)
            }
            Ok(None) => Err(Error::Cancelled),
            Err(error) => Err(Error::Failed(candle_error(&error))),
        }
    }

    fn pass(&self, kv: &mut Kv, ids: &[u32], logits: Logits, cancelled: &dyn Fn() -> bool) -> Result<Option<Vec<f32>>> {
        let c = &self.config;
        let (rows, start) = (ids.len(), kv.len());
        kv.reserve_on_device(rows)?;
        let (cos, sin) = self.rope(start, rows)?;
        let mask = self.mask(start, rows)?;
        let mut x = self.embed(ids)?;
        for (i, layer) in self.layers.iter().enumerate() {
            if cancelled() {
                return Ok(None);
            }
            let h = candle_nn::ops::rms_norm(&x, &layer.attention_norm, c.rms_eps)?;
            x = (x + self.attention(i, layer, &h, kv, &cos, &sin, mask.as_ref())?)?;
            let h = candle_nn::ops::rms_norm(&x, &layer.mlp_norm, c.rms_eps)?;
            let h = (candle_nn::ops::silu(&layer.gate.apply(&h)?)? * layer.up.apply(&h)?)?;
            x = (x + layer.down.apply(&h)?)?;
        }
        let x = match logits {
            Logits::None => return Ok(Some(Vec::new())),
            Logits::Last => x.narrow(0, rows - 1, 1)?,
            Logits::Tail(n) => x.narrow(0, rows - n.min(rows), n.min(rows))?,
            Logits::All => x,
        };
        let x = candle_nn::ops::rms_norm(&x.contiguous()?, &self.norm, c.rms_eps)?;
        Ok(Some(self.head.apply(&x)?.flatten_all()?.to_vec1()?))
    }

    /// [rows, hidden] f32
    fn embed(&self, ids: &[u32]) -> Result<Tensor> {
        let c = &self.config;
        let embedding = self.source.raw(Name::Embedding, c.vocab, c.hidden).map_err(candle_core::Error::msg)?;
        let bytes = embedding.kind.row_bytes(c.hidden);
        let mut x = vec![0f32; ids.len() * c.hidden];
        for (&id, x) in ids.iter().zip(x.chunks_exact_mut(c.hidden)) {
            let id = id as usize;
            if id >= c.vocab {
                candle_core::bail!("token id {id} is outside the vocabulary of {}", c.vocab);
            }
            embedding.kind.dequantize(&embedding.bytes[id * bytes..(id + 1) * bytes], x);
        }
        Tensor::from_vec(x, (ids.len(), c.hidden), &self.device)
    }

    /// Cosines and sines of the positions, [rows, head_dim / 2], in f32 whatever the weights' type: half floats cannot
    /// tell positions above 2,048 apart.
    fn rope(&self, start: usize, rows: usize) -> Result<(Tensor, Tensor)> {
        let half = self.config.head_dim / 2;
        let angles: Vec<f64> = (start..start + rows)
            .flat_map(|p| (0..half).map(move |i| (p, i)))
            .map(|(p, i)| p as f64 * self.config.rope_theta.powf(-(i as f64) / half as f64))
            .collect();
        let table = |f: fn(f64) -> f64| {
            Tensor::from_iter(angles.iter().map(|&a| f(a) as f32), &self.device)?.reshape((rows, half))
        };
        Ok((table(f64::cos)?, table(f64::sin)?))
    }

    /// What is added to the scores, [rows, start + rows]; none for a single row.
    fn mask(&self, start: usize, rows: usize) -> Result<Option<Tensor>> {
        if rows == 1 {
            return Ok(None);
        }
        let len = start + rows;
        let mask: Vec<f32> = (0..rows)
            .flat_map(|r| (0..len).map(move |p| if p <= start + r { 0.0 } else { f32::NEG_INFINITY }))
            .collect();
        Tensor::from_vec(mask, (rows, len), &self.device).map(Some)
    }

    #[allow(clippy::too_many_arguments)]
    fn attention(
        &self,
        i: usize,
        layer: &Layer,
        h: &Tensor,
        kv: &Kv,
        cos: &Tensor,
        sin: &Tensor,
        mask: Option<&Tensor>,
    ) -> Result<Tensor> {
        let c = &self.config;
        let rows = h.dim(0)?;
        let group = c.heads / c.kv_heads;
        // [1, heads, rows, dim]
        let heads = |j: usize, heads: usize| -> Result<Tensor> {
            let (weight, bias) = &layer.qkv[j];
            let x = weight.apply(h)?.broadcast_add(bias)?;
            x.reshape((1, rows, heads, c.head_dim))?.transpose(1, 2)?.contiguous()
        };
        let q = candle_nn::rotary_emb::rope(&heads(0, c.heads)?, cos, sin)?;
        let k = candle_nn::rotary_emb::rope(&heads(1, c.kv_heads)?, cos, sin)?;
        let dtype = match self.kv_type {
            KvType::F32 => DType::F32,
            _ => DType::F16,
        };
        let stored = |t: Tensor| t.squeeze(0)?.to_dtype(dtype);
        let (k, v) = kv.write(i, &stored(k)?, &stored(heads(2, c.kv_heads)?)?)?;
        let (k, v) = (k.to_dtype(DType::F32)?, v.to_dtype(DType::F32)?);
        let len = k.dim(1)?;
        // The query heads that share a KV head stand next to each other: one product each, nothing is repeated.
        let q = q.reshape((c.kv_heads, group * rows, c.head_dim))?;
        let scores = (q.matmul(&k.transpose(1, 2)?.contiguous()?)? * (1.0 / (c.head_dim as f64).sqrt()))?;
        let scores = match mask {
            Some(mask) => {
                let scores = scores.reshape((c.kv_heads * group, rows, len))?.broadcast_add(mask)?;
                scores.reshape((c.kv_heads, group * rows, len))?
            }
            None => scores,
        };
        let out = candle_nn::ops::softmax(&scores, D::Minus1)?.matmul(&v.contiguous()?)?;
        let out = out.reshape((c.heads, rows, c.head_dim))?.transpose(0, 1)?.contiguous()?;
        layer.output.apply(&out.reshape((rows, c.heads * c.head_dim))?)
    }
}
