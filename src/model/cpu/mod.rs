//! Qwen2 on the CPU: packed weights, our own kernels, a block KV.
//!
//! The forward pass is the naive one, layer by layer; the speed is in `matmul` and `attention`. A position's logits are
//! the same bits whatever the chunking, the number of rows and the number of threads.

// A kernel walks several arrays with one index; an iterator over one of them would hide that.
#![allow(clippy::needless_range_loop)]

mod attention;
mod matmul;
mod ops;
mod packed;
mod pool;
mod simd;

use std::cell::RefCell;

use self::attention::Attention;
use self::matmul::{Product, Rows, RowsMut};
use self::packed::{Arena, Packed};
use self::pool::Pool;
#[cfg(target_arch = "x86_64")]
use self::simd::{Avx2, Avx512};
use self::simd::{Portable, Simd};
use super::config::Config;
use super::kv::{BLOCK, KvShape, KvType, SCALED};
use super::source::{Name, Source};
use super::{Error, Logits, Part};

/// Which instructions the kernels use. Results are the same bits in every tier that exists today; a session records the
/// tier all the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tier {
    /// Plain Rust; the oracle of the others.
    Portable,
    /// x86-64 with AVX2, FMA and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// The same with AVX-512's VNNI and BW on 256-bit vectors.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Tier {
    /// The best tier of this machine; `COB_KERNEL_TIER` names a lesser one (`portable` is the oracle).
    pub fn detect() -> Self {
        let all = Self::available();
        let asked = std::env::var("COB_KERNEL_TIER").ok();
        let named = all.iter().find(|tier| asked.as_deref() == Some(tier.name()));
        if let (Some(asked), None) = (&asked, named) {
            let names: Vec<&str> = all.iter().map(|tier| tier.name()).collect();
            tracing::warn!(
                "COB_KERNEL_TIER={asked} is no tier of this machine, which has {}; the best is used",
                names.join(", ")
            );
        }
        named.or(all.last()).copied().unwrap_or(Tier::Portable)
    }

    /// The tiers that this machine can run, the best last.
    pub fn available() -> Vec<Self> {
        let mut all = vec![Tier::Portable];
        #[cfg(target_arch = "x86_64")]
        {
            all.extend(Avx2::available().then_some(Tier::Avx2));
            all.extend(Avx512::available().then_some(Tier::Avx512));
        }
        all
    }

    pub fn name(self) -> &'static str {
        match self {
            Tier::Portable => "portable",
            #[cfg(target_arch = "x86_64")]
            Tier::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Tier::Avx512 => "avx512",
        }
    }
}

/// Runs a generic kernel in a tier. The `#[target_feature]` function is where the tier's instructions become legal; the
/// kernels are inlined into it.
macro_rules! in_tier {
    ($tier:expr, $kernel:ident ( $($arg:ident : $ty:ty),* )) => {{
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma,f16c")]
        #[allow(clippy::too_many_arguments)]
        unsafe fn avx2($($arg: $ty),*) {
            unsafe { $kernel::<Avx2>($($arg),*) }
        }
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
        #[allow(clippy::too_many_arguments)]
        unsafe fn avx512($($arg: $ty),*) {
            unsafe { $kernel::<Avx512>($($arg),*) }
        }
        // SAFETY: `Tier::available` has a tier only where the machine has its instructions; the rest is the kernel's contract.
        unsafe {
            match $tier {
                Tier::Portable => $kernel::<Portable>($($arg),*),
                #[cfg(target_arch = "x86_64")]
                Tier::Avx2 => avx2($($arg),*),
                #[cfg(target_arch = "x86_64")]
                Tier::Avx512 => avx512($($arg),*),
            }
        }
    }};
}

pub(crate) struct CpuModel {
    config: Config,
    source: Source,
    tier: Tier,
    pool: Pool,
    kv_type: KvType,
    layers: Vec<Layer>,
    norm: Vec<f32>,
    head: Packed,
    rope: Rope,
    scratch: Scratch,
    /// Which forms of the activations the weights need.
    floats: bool,
}

struct Layer {
    attention_norm: Vec<f32>,
    /// Query, key, value; their biases.
    qkv: [Packed; 3],
    qkv_bias: [Vec<f32>; 3],
    /// What keys are divided by before they are rounded to 8 bits, and queries multiplied by: [kv_heads · head_dim]; empty where they
    /// are not rounded.
    levels: Vec<f32>,
    output: Packed,
    mlp_norm: Vec<f32>,
    gate_up: [Packed; 2],
    down: Packed,
}

/// Cosines and sines, grown as positions are used.
struct Rope {
    half: usize,
    theta: f64,
    /// [positions, half]
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl Rope {
    fn grow(&mut self, positions: usize) {
        for p in self.cos.len() / self.half..positions {
            for i in 0..self.half {
                let angle = p as f64 * self.theta.powf(-(i as f64) / self.half as f64);
                self.cos.push(angle.cos() as f32);
                self.sin.push(angle.sin() as f32);
            }
        }
    }
}

/// Buffers of one chunk of rows, kept between calls.
#[derive(Default)]
struct Scratch {
    /// [rows, hidden]: the residual stream.
    x: Vec<f32>,
    /// [rows, hidden]: what the last block adds to it.
    delta: Vec<f32>,
    /// [rows, (heads + 2 · kv_heads) · head_dim]
    qkv: Vec<f32>,
    /// [rows, heads · head_dim]
    attended: Vec<f32>,
    /// [rows, 2 · intermediate]
    mlp: Vec<f32>,
    rows: Rows,
}

/// A pointer that the parts of a job use for different rows.
#[derive(Clone, Copy)]
struct Shared<T>(*mut T);
unsafe impl<T> Send for Shared<T> {}
unsafe impl<T> Sync for Shared<T> {}

impl<T> Shared<T> {
    /// # Safety
    /// In bounds, and no one else uses these elements now.
    #[allow(clippy::mut_from_ref)]
    unsafe fn slice(&self, at: usize, len: usize) -> &mut [T] {
        unsafe { std::slice::from_raw_parts_mut(self.0.add(at), len) }
    }
}

impl CpuModel {
    /// Packs all weights, reading the file once from front to back. `threads` in all.
    pub fn load(source: Source, config: Config, tier: Tier, threads: usize, kv_type: KvType) -> Result<Self, String> {
        if kv_type == KvType::Q8_0 && !config.head_dim.is_multiple_of(SCALED) {
            let dim = config.head_dim;
            return Err(format!(
                "keys and values of type q8_0 have a scale for {SCALED} elements, and a head has {dim}; use f16 (--kv-type f16)"
            ));
        }
        let mut pool = Pool::new(threads)
            .map_err(|e| format!("cannot start {threads} threads for the kernels: {e}; ask for fewer (--threads)"))?;
        let c = &config;
        let (mut floats, mut arena) = (false, Arena::default());
        let mut pack = |name: Name, n: usize, k: usize| -> Result<Packed, String> {
            let raw = source.raw(name, n, k)?;
            floats |= raw.kind.is_float();
            let mut packed = Packed::empty(&mut arena, raw.kind, n, k)
                .map_err(|e| format!("no memory for {name:?} ({} bytes): {e}", Packed::bytes(raw.kind, n, k)))?;
            let (panels, bytes, to) = (packed.panels(), packed.panel_bytes(), Shared(packed.base()));
            let unit = (1 << 18) / bytes.max(1) + 1;
            pool.run(panels.div_ceil(unit), &|part| {
                for p in part * unit..((part + 1) * unit).min(panels) {
                    // SAFETY: panels do not overlap, and each is packed by one part.
                    let out = unsafe { to.slice(p * bytes, bytes) };
                    pack_panel(tier, &raw, p, out);
                }
            });
            source.release(&raw);
            Ok(packed)
        };
        let (q, kv) = (c.heads * c.head_dim, c.kv_heads * c.head_dim);
        let mut layers = Vec::with_capacity(c.layers);
        for i in 0..c.layers {
            let mut layer = Layer {
                attention_norm: source.vector(Name::AttentionNorm(i), c.hidden)?,
                qkv: [
                    pack(Name::Query(i), q, c.hidden)?,
                    pack(Name::Key(i), kv, c.hidden)?,
                    pack(Name::Value(i), kv, c.hidden)?,
                ],
                qkv_bias: [
                    source.vector(Name::QueryBias(i), q)?,
                    source.vector(Name::KeyBias(i), kv)?,
                    source.vector(Name::ValueBias(i), kv)?,
                ],
                output: pack(Name::AttentionOutput(i), c.hidden, q)?,
                mlp_norm: source.vector(Name::MlpNorm(i), c.hidden)?,
                gate_up: [pack(Name::Gate(i), c.intermediate, c.hidden)?, pack(Name::Up(i), c.intermediate, c.hidden)?],
                down: pack(Name::Down(i), c.hidden, c.intermediate)?,
                levels: Vec::new(),
            };
            if kv_type == KvType::Q8_0 {
                layer.levels = levels(&layer.qkv_bias[1], c.head_dim);
            }
            layers.push(layer);
        }
        let norm = source.vector(Name::OutputNorm, c.hidden)?;
        // A model without an output matrix uses its embedding.
        let head = if source.has(Name::Output) { Name::Output } else { Name::Embedding };
        let head = pack(head, c.vocab, c.hidden)?;
        source.raw(Name::Embedding, c.vocab, c.hidden)?;
        let rope = Rope { half: c.head_dim / 2, theta: c.rope_theta, cos: Vec::new(), sin: Vec::new() };
        Ok(CpuModel {
            source,
            tier,
            pool,
            kv_type,
            layers,
            norm,
            head,
            rope,
            scratch: Scratch::default(),
            floats,
            config,
        })
    }

    pub fn kv_shape(&self) -> KvShape {
        self.config.kv_shape(self.kv_type)
    }

    /// Evaluates each part's `ids` at the positions after its `kv`, appends their keys and values, and returns the logits
    /// that were asked for. When `cancelled` says so between two layers, every `kv` is as it was.
    pub fn forward(&mut self, parts: &mut [Part], cancelled: &dyn Fn() -> bool) -> Result<Vec<Vec<f32>>, Error> {
        let shape = self.kv_shape();
        assert!(parts.iter().all(|part| part.kv.shape() == &shape), "a KV is another model's");
        let layers = self.config.layers;
        self.embed(parts.iter().flat_map(|part| part.ids))?;
        let end = parts.iter().map(|part| part.kv.len() + part.ids.len()).max().unwrap_or_default();
        self.rope.grow(end);
        let mut sequences = Vec::with_capacity(parts.len());
        let mut rows = 0;
        for part in parts.iter_mut() {
            let (start, count) = (part.kv.len(), part.ids.len());
            sequences.push(Sequence { first: rows, rows: count, start, blocks: part.kv.reserve(count) });
            rows += count;
        }
        for i in 0..layers {
            if cancelled() {
                // Room was made; the positions have not been counted.
                parts.iter_mut().for_each(|part| part.kv.drop_reserved());
                return Err(Error::Cancelled);
            }
            self.attention_block(i, &sequences, rows);
            self.mlp_block(i, rows);
        }
        let wanted: Vec<std::ops::Range<usize>> = sequences
            .iter()
            .zip(&*parts)
            .map(|(s, part)| match part.logits {
                Logits::None => s.first..s.first,
                Logits::Last => s.first + s.rows - 1..s.first + s.rows,
                Logits::Tail(n) => s.first + s.rows - n.min(s.rows)..s.first + s.rows,
                Logits::All => s.first..s.first + s.rows,
            })
            .collect();
        parts.iter_mut().for_each(|part| part.kv.advance(part.ids.len()));
        Ok(self.logits(&wanted))
    }

    fn embed<'a>(&mut self, ids: impl Iterator<Item = &'a u32> + Clone) -> Result<(), Error> {
        let c = &self.config;
        let embedding = self.source.raw(Name::Embedding, c.vocab, c.hidden).map_err(Error::Failed)?;
        let bytes = embedding.kind.row_bytes(c.hidden);
        let rows = ids.clone().count();
        let s = &mut self.scratch;
        s.x.resize(rows * c.hidden, 0.0);
        s.delta.resize(rows * c.hidden, 0.0);
        s.qkv.resize(rows * (c.heads + 2 * c.kv_heads) * c.head_dim, 0.0);
        s.attended.resize(rows * c.heads * c.head_dim, 0.0);
        s.mlp.resize(rows * 2 * c.intermediate, 0.0);
        for (&id, x) in ids.zip(s.x.chunks_exact_mut(c.hidden)) {
            let id = id as usize;
            if id >= c.vocab {
                return Err(Error::Failed(format!("token id {id} is outside the vocabulary of {}", c.vocab)));
            }
            embedding.kind.dequantize(&embedding.bytes[id * bytes..(id + 1) * bytes], x);
        }
        Ok(())
    }

    fn attention_block(&mut self, i: usize, sequences: &[Sequence], rows: usize) {
        let (tier, c, shape) = (self.tier, self.config.clone(), self.kv_shape());
        let norm = Norm { weight: &self.layers[i].attention_norm, eps: c.rms_eps, add: i > 0 };
        normed(&mut self.pool, tier, &mut self.scratch, self.floats, norm, rows);

        let dim = c.head_dim;
        let (q, kv) = (c.heads * dim, c.kv_heads * dim);
        let stride = q + 2 * kv;
        let s = &mut self.scratch;
        let layer = &self.layers[i];
        let out = s.qkv.as_mut_ptr();
        let product = |j: usize, offset: usize| Product {
            weights: &layer.qkv[j],
            bias: Some(&layer.qkv_bias[j]),
            // SAFETY: within the first row.
            out: unsafe { out.add(offset) },
            stride,
        };
        products(&mut self.pool, tier, &[product(0, 0), product(1, q), product(2, q + kv)], &s.rows, rows);

        let qkv = Shared(out);
        let rope = &self.rope;
        by_rows(&mut self.pool, rows, &|r| {
            let sequence = &sequences[sequences.partition_point(|s| s.first <= r) - 1];
            let position = sequence.start + r - sequence.first;
            // SAFETY: each row is touched by one part.
            let row = unsafe { qkv.slice(r * stride, stride) };
            let block = sequence.blocks[position / BLOCK];
            let (cos, sin) = {
                let at = position * rope.half;
                (&rope.cos[at..at + rope.half], &rope.sin[at..at + rope.half])
            };
            let (shape, layer_index, heads, levels) = (&shape, i, c.heads, &layer.levels[..]);
            in_tier!(tier, position_row(shape: &KvShape, layer_index: usize, heads: usize, row: &mut [f32], cos: &[f32], sin: &[f32], levels: &[f32], block: *mut u8, position: usize));
        });

        const TILE: usize = 8;
        let mut tiles: Vec<(Attention, usize, usize)> = Vec::new();
        for sequence in sequences {
            let attention = Attention {
                shape,
                layer: i,
                group: c.heads / c.kv_heads,
                blocks: &sequence.blocks,
                start: sequence.start,
                // SAFETY: the sequence's first row, here and below.
                q: unsafe { out.add(sequence.first * stride) },
                q_stride: stride,
                out: unsafe { s.attended.as_mut_ptr().add(sequence.first * q) },
                out_stride: q,
            };
            for first in (0..sequence.rows).step_by(TILE) {
                tiles.push((attention, first, (first + TILE).min(sequence.rows)));
            }
        }
        // The rows that see most begin first, so that no thread is left with them at the end.
        tiles.sort_by_key(|(attention, _, last)| std::cmp::Reverse(attention.start + last));
        self.pool.run(tiles.len() * c.kv_heads, &|part| {
            let ((attention, first, last), head) = (&tiles[part / c.kv_heads], part % c.kv_heads);
            let (first, last) = (*first, *last);
            in_tier!(tier, attend_rows(attention: &Attention, head: usize, first: usize, last: usize));
        });

        s.rows.resize(rows, q, self.floats);
        let (attended, to) = (Shared(s.attended.as_mut_ptr()), s.rows.view());
        by_rows(&mut self.pool, rows, &|r| {
            // SAFETY: each row is touched by one part.
            let x = unsafe { &*attended.slice(r * q, q) };
            in_tier!(tier, quantize(x: &[f32], to: RowsMut, r: usize));
        });
        let product = Product { weights: &layer.output, bias: None, out: s.delta.as_mut_ptr(), stride: c.hidden };
        products(&mut self.pool, tier, &[product], &s.rows, rows);
    }

    fn mlp_block(&mut self, i: usize, rows: usize) {
        let (tier, n, hidden) = (self.tier, self.config.intermediate, self.config.hidden);
        let norm = Norm { weight: &self.layers[i].mlp_norm, eps: self.config.rms_eps, add: true };
        normed(&mut self.pool, tier, &mut self.scratch, self.floats, norm, rows);

        let s = &mut self.scratch;
        let layer = &self.layers[i];
        let out = s.mlp.as_mut_ptr();
        let product = |j: usize| Product {
            weights: &layer.gate_up[j],
            bias: None,
            // SAFETY: within the first row.
            out: unsafe { out.add(j * n) },
            stride: 2 * n,
        };
        products(&mut self.pool, tier, &[product(0), product(1)], &s.rows, rows);

        s.rows.resize(rows, n, self.floats);
        let (mlp, to) = (Shared(out), s.rows.view());
        by_rows(&mut self.pool, rows, &|r| {
            // SAFETY: each row is touched by one part.
            let (gate, up) = unsafe { mlp.slice(r * 2 * n, 2 * n) }.split_at_mut(n);
            let up = &*up;
            in_tier!(tier, swiglu_row(gate: &mut [f32], up: &[f32], to: RowsMut, r: usize));
        });
        let product = Product { weights: &layer.down, bias: None, out: s.delta.as_mut_ptr(), stride: hidden };
        products(&mut self.pool, tier, &[product], &s.rows, rows);
    }

    /// Logits of ranges of rows that follow one another: for each [rows, vocab]. The residual stream is used up.
    fn logits(&mut self, wanted: &[std::ops::Range<usize>]) -> Vec<Vec<f32>> {
        let (hidden, vocab) = (self.config.hidden, self.config.vocab);
        // They move to the front.
        let mut rows = 0;
        for range in wanted {
            for values in [&mut self.scratch.x, &mut self.scratch.delta] {
                values.copy_within(range.start * hidden..range.end * hidden, rows * hidden);
            }
            rows += range.len();
        }
        let norm = Norm { weight: &self.norm, eps: self.config.rms_eps, add: true };
        normed(&mut self.pool, self.tier, &mut self.scratch, self.floats, norm, rows);
        let mut all = vec![0f32; rows * vocab];
        let product = Product { weights: &self.head, bias: None, out: all.as_mut_ptr(), stride: vocab };
        products(&mut self.pool, self.tier, &[product], &self.scratch.rows, rows);
        let mut out: Vec<Vec<f32>> =
            wanted.iter().rev().map(|range| all.split_off(all.len() - range.len() * vocab)).collect();
        out.reverse();
        out
    }
}

/// Qwen2.5's key bias is some hundreds in a few elements and one in the others, which a common scale of 8 bits would round away. An element
/// and its partner in the rotation are divided by their bias, so that all are of one order; the queries make up for it.
fn levels(key_bias: &[f32], head_dim: usize) -> Vec<f32> {
    let mut levels = vec![1.0; key_bias.len()];
    for (bias, levels) in key_bias.chunks_exact(head_dim).zip(levels.chunks_exact_mut(head_dim)) {
        let half = head_dim / 2;
        for i in 0..half {
            let level = (bias[i].hypot(bias[i + half]) / LEVEL).max(1.0);
            (levels[i], levels[i + half]) = (level, level);
        }
    }
    levels
}

/// The order of magnitude of keys without a large bias.
const LEVEL: f32 = 4.0;

/// Rows of a pass that are one sequence's.
struct Sequence {
    /// Of the pass.
    first: usize,
    rows: usize,
    /// Position of the first row.
    start: usize,
    /// Addresses of its blocks from position 0 on.
    blocks: Vec<*mut u8>,
}

// SAFETY: rows of different positions are written, each by one thread.
unsafe impl Sync for Sequence {}

struct Norm<'a> {
    weight: &'a [f32],
    eps: f32,
    /// Whether a block's output waits to be added to the residual stream.
    add: bool,
}

/// `x += delta`, norm, quantise: the input of the next products.
fn normed(pool: &mut Pool, tier: Tier, s: &mut Scratch, floats: bool, norm: Norm, rows: usize) {
    let Norm { weight, eps, add } = norm;
    let hidden = weight.len();
    s.rows.resize(rows, hidden, floats);
    let (x, delta, to) = (Shared(s.x.as_mut_ptr()), Shared(s.delta.as_mut_ptr()), s.rows.view());
    by_rows(pool, rows, &|r| {
        // SAFETY: each row is touched by one part.
        let (x, delta) = unsafe { (x.slice(r * hidden, hidden), delta.slice(r * hidden, hidden)) };
        in_tier!(tier, norm_row(x: &mut [f32], delta: &mut [f32], add: bool, weight: &[f32], eps: f32, to: RowsMut, r: usize))
    });
}

/// One part a few rows.
fn by_rows(pool: &mut Pool, rows: usize, f: &(dyn Fn(usize) + Sync)) {
    const UNIT: usize = 8;
    pool.run(rows.div_ceil(UNIT), &|part| (part * UNIT..(part * UNIT + UNIT).min(rows)).for_each(f));
}

/// Several products of the same activations, as one job.
fn products(pool: &mut Pool, tier: Tier, products: &[Product], x: &Rows, rows: usize) {
    if rows == 0 {
        return;
    }
    thread_local! {
        static BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
    }
    let total_panels: usize = products.iter().map(|p| p.weights.panels()).sum();
    // Small enough that no thread waits long for the last part, large enough that a part is worth a step of the counter.
    // Even, for the longest vectors take two panels.
    let unit = (total_panels / (pool.threads() * 8)).clamp(2, 8).next_multiple_of(2);
    let parts = |p: &Product| p.weights.panels().div_ceil(unit);
    let total: usize = products.iter().map(parts).sum();
    pool.run(total, &|mut part| {
        for product in products {
            if part < parts(product) {
                let (from, to) = (part * unit, ((part + 1) * unit).min(product.weights.panels()));
                BUFFER.with_borrow_mut(|buffer| {
                    let product = *product;
                    in_tier!(tier, panels(product: Product, x: &Rows, rows: usize, from: usize, to: usize, buffer: &mut Vec<u8>));
                });
                return;
            }
            part -= parts(product);
        }
    });
}

/// Packing is byte shuffling that the compiler turns into the tier's vectors.
fn pack_panel(tier: Tier, raw: &super::gguf::Raw, p: usize, out: &mut [u8]) {
    #[inline(always)]
    unsafe fn pack<S: Simd>(raw: &super::gguf::Raw, p: usize, out: &mut [u8]) {
        packed::pack_panel(raw.kind, raw.bytes, raw.n, raw.k, p, out)
    }
    in_tier!(tier, pack(raw: &super::gguf::Raw, p: usize, out: &mut [u8]))
}

#[inline(always)]
unsafe fn panels<S: Simd>(p: Product, x: &Rows, rows: usize, from: usize, to: usize, buffer: &mut Vec<u8>) {
    unsafe { matmul::panels::<S>(p, x, rows, from, to, buffer) }
}

#[inline(always)]
unsafe fn norm_row<S: Simd>(
    x: &mut [f32],
    delta: &mut [f32],
    add: bool,
    weight: &[f32],
    eps: f32,
    to: RowsMut,
    r: usize,
) {
    unsafe {
        ops::rms_norm::<S>(x, delta, add, weight, eps);
        matmul::quantize_row::<S>(delta, to, r);
    }
}

#[inline(always)]
unsafe fn quantize<S: Simd>(x: &[f32], to: RowsMut, r: usize) {
    unsafe { matmul::quantize_row::<S>(x, to, r) }
}

#[inline(always)]
unsafe fn swiglu_row<S: Simd>(gate: &mut [f32], up: &[f32], to: RowsMut, r: usize) {
    unsafe {
        ops::swiglu::<S>(gate, up);
        matmul::quantize_row::<S>(gate, to, r);
    }
}

/// Rotates queries and keys of one position and stores its keys and values.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn position_row<S: Simd>(
    shape: &KvShape,
    layer: usize,
    heads: usize,
    row: &mut [f32],
    cos: &[f32],
    sin: &[f32],
    levels: &[f32],
    block: *mut u8,
    position: usize,
) {
    let dim = shape.head_dim;
    let (q, kv) = (heads * dim, shape.kv_heads * dim);
    unsafe {
        row[..q + kv].chunks_exact_mut(dim).for_each(|head| ops::rope::<S>(head, cos, sin));
        if !levels.is_empty() {
            let group = heads / shape.kv_heads;
            for (head, q) in row[..q].chunks_exact_mut(dim).enumerate() {
                let levels = &levels[head / group * dim..][..dim];
                q.iter_mut().zip(levels).for_each(|(q, level)| *q *= level);
            }
            row[q..q + kv].iter_mut().zip(levels).for_each(|(k, level)| *k /= level);
        }
        let (keys, values) = row[q..].split_at(kv);
        for (h, (k, v)) in keys.chunks_exact(dim).zip(values.chunks_exact(dim)).enumerate() {
            attention::store_position::<S>(shape, layer, h, block, position, k, v);
        }
    }
}

#[inline(always)]
unsafe fn attend_rows<S: Simd>(a: &Attention, kv_head: usize, first: usize, last: usize) {
    unsafe { attention::attend::<S>(a, kv_head, first, last) }
}
